// The conversation: sends it, shows the answer as it comes, runs the tool that it calls, stops it, asks again.
// Text of users and models reaches the page as text nodes only, never as markup.

import { call, items } from "./api.js";
import { Pictures } from "./pictures.js";
import { CLOCK, runTool } from "./tools.js";

const byId = (id) => document.getElementById(id);
const NEAR_END_PX = 60; // so close to the end the view follows the text
const MAX_CALL_ROUNDS = 3; // then the model has to answer

export class Chat {
  // settings() gives the request's fields, the system prompt and tool_choice, or null when one is not valid.
  constructor({ settings, modelName, onError }) {
    this.settings = settings;
    this.modelName = modelName;
    this.onError = onError;
    this.messages = []; // {role, content, ...} as the API wants them
    this.running = null; // AbortController of the answer under way
    this.pictures = new Pictures();

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
    if (this.running || !(text.trim() || this.pictures.chosen.length)) return;
    const settings = this.settings();
    if (!settings) return;
    byId("input").value = "";
    fitInput();
    const pictures = this.pictures.take();
    const parts = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
    this.messages.push({ role: "user", content: parts.length ? [...parts, { type: "text", text }] : text });
    const view = new View("user", "You");
    view.text.before(...pictures.map(({ canvas }) => canvas));
    view.append(text);
    this.answer(settings);
  }

  // Throws the last answer away and asks for another one.
  again(view) {
    const settings = this.running ? null : this.settings();
    if (!settings) return;
    while (this.messages.at(-1).role !== "user") this.messages.pop(); // calls and results too
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

  async answer({ fields, system, tool }) {
    const conversation = this.messages; // another list after clear()
    const view = new View("assistant", this.modelName() || "Model", (it) => this.again(it));
    const running = (this.running = new AbortController());
    this.showState();
    const prefix = system ? [{ role: "system", content: system }] : [];
    let turn;
    try {
      for (let round = 0; round <= MAX_CALL_ROUNDS && (!round || turn.calls.length); round++) {
        const later = round < MAX_CALL_ROUNDS ? "auto" : "none"; // or a model that must call would never answer
        const tools = { tools: [CLOCK], tool_choice: round ? later : tool, parallel_tool_calls: false };
        const body = {
          model: this.modelName() || undefined,
          messages: [...prefix, ...conversation],
          stream: true,
          stream_options: { include_usage: true },
          ...fields,
          ...(tool ? tools : {}),
        };
        turn = { content: "", calls: [] };
        await this.receive(body, running.signal, view, turn);
        if (turn.calls.length) conversation.push(...runCalls(turn, view));
      }
    } catch (error) {
      if (running.signal.aborted) {
        view.notes.push("stopped");
      } else {
        view.fail(error.message);
        this.onError(error);
      }
    }
    if (turn.content) conversation.push({ role: "assistant", content: turn.content });
    view.finish();
    if (this.running === running) this.running = null;
    this.showState();
  }

  // Shows an answer as it comes, and puts its content and its complete calls into `turn`.
  async receive(body, signal, view, turn) {
    const started = performance.now();
    let first = 0;
    let last = 0;
    let usage = null;
    const calls = [];
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
      if (choice.delta.content) {
        turn.content += choice.delta.content;
        view.append(choice.delta.content);
      }
      for (const part of choice.delta.tool_calls ?? []) {
        calls[part.index] ??= view.call({ id: part.id, name: part.function.name, arguments: "" });
        calls[part.index].add(part.function.arguments ?? "");
      }
      if (thought || choice.delta.content || choice.delta.tool_calls) {
        last = performance.now();
        first ||= last;
      }
      if (choice.finish_reason === "length") view.notes.push("token limit reached");
      else if (choice.finish_reason) turn.calls = calls;
    }
    if (usage && first) view.figures = figures(usage, started, first, last);
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

// Runs the calls of a turn; the messages for them and for their results.
function runCalls(turn, view) {
  const tool_calls = turn.calls.map(({ call: { id, ...it } }) => ({ id, type: "function", function: it }));
  const message = { role: "assistant", content: turn.content || null, tool_calls };
  const results = turn.calls.map((shown) => {
    const content = runTool(shown.call);
    shown.result(content);
    return { role: "tool", tool_call_id: shown.call.id, content };
  });
  if (turn.content) view.append("\n\n");
  turn.content = "";
  return [message, ...results];
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
    this.figures = []; // of the last request
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

  // A call on the page: add() appends to its arguments, result() shows what it returned.
  call(call) {
    const item = byId("call-template").content.cloneNode(true).querySelector("li");
    item.querySelector("b").textContent = call.name;
    const text = item.querySelector("code").appendChild(new Text());
    const list = this.element.querySelector(".calls");
    list.append(item);
    list.hidden = false;
    return {
      call,
      add: (part) => {
        call.arguments += part;
        this.show(text, part);
      },
      result: (content) => {
        const output = item.querySelector("output");
        output.textContent = content;
        output.hidden = false;
      },
    };
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
    note.textContent = [...this.figures, ...this.notes].join(" \u00b7 ");
    note.hidden = !note.textContent;
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
