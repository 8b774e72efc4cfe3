// Puts the page together: settings, key, the server's state, chat and ranks.

import { call, hasKey, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { Ranks } from "./ranks.js";

const byId = (id) => document.getElementById(id);
let model = "";

// The sampling fields that are filled in, the system prompt and the tool; null when one is not valid.
function settings() {
  const form = byId("sampling");
  if (!form.checkValidity()) {
    byId("settings").open = true; // or the browser could not point at the field
    form.reportValidity();
    return null;
  }
  const filled = [...form.querySelectorAll("input")].filter((input) => input.value !== "");
  return {
    fields: Object.fromEntries(filled.map((input) => [input.name, input.valueAsNumber])),
    system: byId("system").value.trim(),
    tool: byId("tool").value,
  };
}

async function loadModel() {
  try {
    const card = (await (await call("v1/models")).json()).data[0];
    model = card.id;
    byId("model").textContent = model;
    byId("model").title = `up to ${card.max_model_len} tokens`;
    document.title = `${model} \u00b7 Phalanx`;
    byId("key-form").hidden = true;
  } catch (error) {
    askForKey(error);
  }
}

function askForKey(error) {
  if (error.status !== 401 || !byId("key-form").hidden) return;
  byId("key-form").hidden = false;
  if (hasKey()) byId("key-note").textContent = "The server refused this key.";
  byId("key").focus();
}

// Told once a second: null, or why the ranks did not answer.
function showState(error) {
  const state = byId("state");
  const [kind, text] = stateOf(error);
  if (state.dataset.state !== kind || state.textContent !== text) {
    state.dataset.state = kind;
    state.textContent = text;
  }
  state.title = error?.message ?? "";
  if (error) askForKey(error);
  if (!model && byId("key-form").hidden) loadModel();
}

function stateOf(error) {
  if (!error) return ["ready", "ready"];
  if (error.status === 401) return ["wait", "key needed"];
  if (error.status === 503) return ["wait", "not ready"];
  if (error.status === 0) return ["gone", "no connection"];
  return ["gone", "no figures"];
}

byId("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  setKey(byId("key").value);
  byId("key").value = "";
  byId("key-form").hidden = true;
  await loadModel();
  ranks.schedule(0);
  if (byId("key-form").hidden) byId("input").focus();
});
byId("sampling").addEventListener("submit", (event) => event.preventDefault());

if (matchMedia("(max-width: 820px)").matches) {
  byId("settings").open = byId("ranks").open = false;
}
new Chat({ settings, modelName: () => model, onError: askForKey });
const ranks = new Ranks(showState);
loadModel().then(() => ranks.schedule(0));
