// Pictures for the next message: dropped, pasted or chosen. Canvases show them, because the page's policy shows no
// image from data.

const byId = (id) => document.getElementById(id);
const THUMB_PX = 96;

export class Pictures {
  constructor() {
    this.chosen = []; // {url, canvas}
    byId("chat").addEventListener("dragover", (event) => event.preventDefault());
    byId("chat").addEventListener("drop", (event) => {
      event.preventDefault();
      this.add(event.dataTransfer.files);
    });
    byId("input").addEventListener("paste", (event) => {
      if (!event.clipboardData.files.length) return; // text
      event.preventDefault();
      this.add(event.clipboardData.files);
    });
    byId("picture").addEventListener("change", (event) => {
      this.add([...event.target.files]);
      event.target.value = ""; // so that the same file can be chosen again
    });
  }

  async add(files) {
    for (const file of files) {
      const url = await asDataUrl(file);
      this.chosen.push({ url, canvas: await thumbnail(file) });
      this.show();
    }
  }

  // Gives the pictures away.
  take() {
    const taken = this.chosen;
    this.chosen = [];
    this.show();
    return taken;
  }

  show() {
    const items = this.chosen.map((picture) => {
      const remove = document.createElement("button");
      remove.type = "button";
      remove.ariaLabel = remove.title = "Remove the picture";
      remove.append(picture.canvas);
      remove.addEventListener("click", () => {
        this.chosen = this.chosen.filter((other) => other !== picture);
        this.show();
        byId("input").focus();
      });
      return remove;
    });
    byId("pictures").replaceChildren(...items);
    byId("pictures").hidden = !items.length;
  }
}

function asDataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

// A small canvas; empty for a file that this browser cannot show. The server says what it cannot read.
async function thumbnail(file) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = THUMB_PX;
  try {
    const image = await createImageBitmap(file);
    const scale = THUMB_PX / Math.max(image.width, image.height);
    canvas.width = Math.max(1, Math.round(image.width * scale));
    canvas.height = Math.max(1, Math.round(image.height * scale));
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  } catch {
    // not an image
  }
  return canvas;
}
