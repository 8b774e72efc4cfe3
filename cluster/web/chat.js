// The conversation: sends it, shows the answer as it comes, stops it, asks again.
// Text of users and models reaches the page as text nodes only, never as markup.

import { call, items } from "./api.js";

const byId = (id) => document.getElementById(id);
const NEAR_END_PX = 60; // so close to the end the view follows the text

export class Chat {
  // settings() gives the request's fields and the system prompt, or null when one is not valid.
  constructor({ settings, modelName, onError }) {
    this.settings = settings;
    this.modelName = modelName;
    this.onError = onError;
    this.messages = []; // {role, content} as the API wants them
    this.running = null; // AbortController of the answer under way

    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("input").addEventListener("keydown", (event) => {
      // An Enter that ends an input method's composition is not meant for us.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    byId("input").addEventListener("input", fitInput);
    byId("stop").addEventListener("click", () => this.stop());
    byId("clear").addEventListener("click", () => this.clear());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
  }

  send() {
    const text = byId("input").value;
    if (this.running || !text.trim()) return;
    const settings = this.settings();
    if (!settings) return;
    byId("input").value = "";
    fitInput();
    this.messages.push({ role: "user", content: text });
    new View("user", "You").append(text);
    this.answer(settings);
  }

  // Throws the last answer away and asks for another one.
  again(view) {
    const settings = this.running ? null : this.settings();
    if (!settings) return;
    if (this.messages.at(-1).role === "assistant") this.messages.pop();
    view.element.remove();
    this.answer(settings);
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    byId("log").replaceChildren();
    this.showState();
    byId("input").focus();
  }

  async answer({ fields, system }) {
    const conversation = this.messages; // another list after clear()
    const view = new View("assistant", this.modelName() || "Model", (it) => this.again(it));
    const running = (this.running = new AbortController());
    this.showState();
    const prefix = system ? [{ role: "system", content: system }] : [];
    const body = {
      model: this.modelName() || undefined,
      messages: [...prefix, ...conversation],
      stream: true,
      stream_options: { include_usage: true },
      ...fields,
    };
    try {
      await this.receive(body, running.signal, view);
    } catch (error) {
      if (running.signal.aborted) {
        view.notes.push("stopped");
      } else {
        view.fail(error.message);
        this.onError(error);
      }
    }
    if (view.content) conversation.push({ role: "assistant", content: view.content });
    view.finish();
    if (this.running === running) this.running = null;
    this.showState();
  }

  async receive(body, signal, view) {
    const started = performance.now();
    let first = 0;
    let last = 0;
    let usage = null;
    const response = await call("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
      signal,
    });
    for await (const item of items(response, signal)) {
      usage = item.usage ?? usage;
      const choice = item.choices[0];
      if (!choice) continue;
      const thought = choice.delta.reasoning_content ?? choice.delta.reasoning;
      if (thought) view.think(thought);
      if (choice.delta.content) view.append(choice.delta.content);
      if (thought || choice.delta.content) {
        last = performance.now();
        first ||= last;
      }
      if (choice.finish_reason === "length") view.notes.push("token limit reached");
    }
    if (usage && first) view.notes.unshift(...figures(usage, started, first, last));
  }

  showState() {
    const busy = this.running !== null;
    byId("send").hidden = busy;
    byId("stop").hidden = !busy;
    byId("log").ariaBusy = String(busy); // a screen reader reads the answer once it is complete
    byId("clear").disabled = !byId("log").hasChildNodes();
    byId("welcome").hidden = byId("log").hasChildNodes();
  }
}

function figures(usage, started, first, last) {
  const count = usage.completion_tokens;
  const found = [`${count} token${count === 1 ? "" : "s"}`];
  if (count > 1 && last > first) found.push(`${Math.round(((count - 1) * 1000) / (last - first))} tok/s`);
  found.push(`first after ${Math.round(first - started)} ms`);
  const cached = usage.prompt_tokens_details?.cached_tokens;
  if (cached) found.push(`${cached} of ${usage.prompt_tokens} prompt tokens cached`);
  return found;
}

// One message on the page.
class View {
  constructor(role, name, again) {
    this.content = "";
    this.notes = [];
    this.waiting = []; // [text node, text] not shown yet
    const fragment = byId("message-template").content.cloneNode(true);
    this.element = fragment.querySelector(".message");
    this.element.dataset.role = role;
    this.element.querySelector("h2").textContent = name;
    this.text = this.element.querySelector(":scope > .text").appendChild(new Text());
    this.thoughts = this.element.querySelector(".thinking .text").appendChild(new Text());
    if (again) this.element.dataset.running = "";
    this.element.querySelector(".again").addEventListener("click", () => again(this));
    const copy = this.element.querySelector(".copy");
    copy.hidden = !navigator.clipboard; // only pages of localhost or https have one
    copy.addEventListener("click", async () => {
      await navigator.clipboard.writeText(this.content);
      copy.textContent = "Copied";
    });
    byId("log").append(fragment);
    byId("scroll").scrollTop = byId("scroll").scrollHeight;
  }

  append(text) {
    this.content += text;
    this.show(this.text, text);
  }

  think(text) {
    this.element.querySelector(".thinking").hidden = false;
    this.show(this.thoughts, text);
  }

  // Tokens come faster than frames: the page changes once a frame.
  show(node, text) {
    if (!this.waiting.length) requestAnimationFrame(() => this.flush());
    this.waiting.push([node, text]);
  }

  flush() {
    const scroll = byId("scroll");
    const follow = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < NEAR_END_PX;
    for (const [node, text] of this.waiting) node.appendData(text);
    this.waiting = [];
    if (follow) scroll.scrollTop = scroll.scrollHeight;
  }

  fail(message) {
    const error = this.element.querySelector(".error");
    error.textContent = message;
    error.hidden = false;
    this.element.querySelector(".again").textContent = "Try again";
  }

  finish() {
    delete this.element.dataset.running;
    const note = this.element.querySelector(".note");
    note.textContent = this.notes.join(" \u00b7 ");
    note.hidden = !this.notes.length;
    if (!this.content) this.element.querySelector(".copy").hidden = true;
    this.element.querySelector("footer").hidden = false;
    this.flush();
  }
}

function fitInput() {
  const input = byId("input");
  input.style.height = "auto";
  const border = input.offsetHeight - input.clientHeight;
  input.style.height = `${input.scrollHeight + border}px`;
}
