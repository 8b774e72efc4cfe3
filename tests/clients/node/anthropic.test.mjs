// The official Anthropic client for Node against a real server: PHALANX_URL is its base URL. Run by test_node.py.

import assert from "node:assert/strict";
import { test } from "node:test";
import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";

const client = new Anthropic({ baseURL: process.env.PHALANX_URL, apiKey: "unused", maxRetries: 0 });

const HELLO = [{ role: "user", content: "Hello" }];
const ANSWER = "Hello! I am a small demo model served by Phalanx.";
const LOOK_UP = {
  type: "object",
  properties: { name: { enum: ["dict", "list"] }, deep: { type: "boolean" } },
  required: ["name", "deep"],
  additionalProperties: false,
};
const TOOL = { name: "look_up", description: "Look a name up.", input_schema: LOOK_UP };
const NAMED = { type: "tool", name: "look_up" };

const asked = (fields) => ({
  model: "demo", max_tokens: 200, temperature: 0, messages: HELLO, ...fields,
});
const say = (fields) => client.messages.create(asked(fields));
const inputTokens = ({ usage }) => usage.input_tokens + usage.cache_read_input_tokens;

// The error of a call that must fail.
async function failure(call) {
  try {
    await call();
  } catch (error) {
    return error;
  }
  return assert.fail("no error");
}

test("a message", async () => {
  const message = await say();
  assert.ok(message.content[0].text.startsWith(ANSWER));
  assert.equal(message.stop_reason, "end_turn");
  assert.ok(message.usage.output_tokens > 5);
});

test("the streaming helper", async () => {
  const kinds = [];
  const stream = client.messages.stream(asked());
  stream.on("streamEvent", (event) => kinds.push(event.type));
  let text = "";
  stream.on("text", (delta) => { text += delta; });
  const message = await stream.finalMessage();
  assert.equal(message.content[0].text, text);
  assert.equal(text, (await say()).content[0].text);
  const deltas = kinds.filter((kind) => kind === "content_block_delta");
  assert.ok(deltas.length > 5);
  assert.deepEqual(kinds.filter((kind) => kind !== "ping"), [
    "message_start", "content_block_start", ...deltas,
    "content_block_stop", "message_delta", "message_stop",
  ]);
});

test("a raw stream", async () => {
  let text = "";
  for await (const event of await say({ stream: true })) {
    if (event.type === "content_block_delta") text += event.delta.text;
  }
  assert.ok(text.startsWith(ANSWER));
});

test("a tool and its result", async () => {
  const question = { role: "user", content: "What is a dict?" };
  const first = await say({ messages: [question], tools: [TOOL], tool_choice: NAMED });
  assert.equal(first.stop_reason, "tool_use");
  const call = first.content.find((block) => block.type === "tool_use");
  assert.ok(["dict", "list"].includes(call.input.name));
  const result = { type: "tool_result", tool_use_id: call.id, content: "It maps keys." };
  const messages = [
    question, { role: "assistant", content: first.content }, { role: "user", content: [result] },
  ];
  const second = await say({ messages, tools: [TOOL] });
  assert.ok(inputTokens(second) > inputTokens(first) + 10);
});

test("a streamed tool", async () => {
  const stream = client.messages.stream(asked({ tools: [TOOL], tool_choice: NAMED }));
  let json = "";
  stream.on("inputJson", (delta) => { json += delta; });
  const message = await stream.finalMessage();
  assert.equal(message.stop_reason, "tool_use");
  const calls = message.content.filter((block) => block.type === "tool_use");
  assert.ok(json.startsWith(JSON.stringify(calls[0].input).slice(0, 7)));
  assert.equal(typeof calls[0].input.deep, "boolean");
});

test("the helper that runs tools", async () => {
  const seen = [];
  const lookUp = betaTool({
    name: "look_up",
    description: "Look a name up.",
    inputSchema: LOOK_UP,
    run: (input) => {
      seen.push(input);
      return "It maps keys to values.";
    },
  });
  const runner = client.beta.messages.toolRunner(asked({
    tools: [lookUp], tool_choice: NAMED, max_iterations: 2,
  }));
  const messages = [];
  for await (const message of runner) messages.push(message);
  assert.equal(messages.length, 2);
  assert.ok(seen.length >= 1 && typeof seen[0].deep === "boolean");
  assert.ok(inputTokens(messages[1]) > inputTokens(messages[0]) + 10);
});

test("count_tokens", async () => {
  const body = { model: "demo", messages: HELLO, system: "Be short.", tools: [TOOL] };
  const { input_tokens: count } = await client.messages.countTokens(body);
  assert.equal(count, inputTokens(await say({ ...body, max_tokens: 1 })));
});

test("stop sequences and limits", async () => {
  const stopped = await say({ stop_sequences: ["small"] });
  assert.deepEqual([stopped.stop_reason, stopped.stop_sequence], ["stop_sequence", "small"]);
  assert.equal((await say({ max_tokens: 2 })).stop_reason, "max_tokens");
});

test("errors", async () => {
  const wrong = await failure(() => say({ temperature: 3 }));
  assert.ok(wrong instanceof Anthropic.BadRequestError);
  assert.equal(wrong.error.error.type, "invalid_request_error");
  assert.match(wrong.message, /temperature/);
  assert.ok(wrong.requestID);
  const missing = await failure(() => say({ model: "other" }));
  assert.ok(missing instanceof Anthropic.NotFoundError);
});

test("aborting a stream", async () => {
  const stream = client.messages.stream(asked({ max_tokens: 1500 }));
  let count = 0;
  for await (const event of stream) {
    assert.ok(event.type);
    if ((count += 1) === 4) break;
  }
  assert.ok(count === 4);
});
