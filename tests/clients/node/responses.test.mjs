// The official Node client on the responses API: PHALANX_URL is the server's base URL. Run by test_node.py.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";

const client = new OpenAI({
  baseURL: `${process.env.PHALANX_URL}/v1`, apiKey: "unused", maxRetries: 0,
});

const ANSWER = "Hello! I am a small demo model served by Phalanx.";
const LOOK_UP = {
  type: "object",
  properties: { name: { enum: ["dict", "list"] }, deep: { type: "boolean" } },
  required: ["name", "deep"],
  additionalProperties: false,
};
const TOOLS = [{ type: "function", name: "look_up", parameters: LOOK_UP, strict: true }];
const NAMED = { type: "function", name: "look_up" };

const asked = (fields) => ({
  model: "demo", input: "Hello", temperature: 0, max_output_tokens: 200, ...fields,
});
const respond = (fields) => client.responses.create(asked(fields));
const sleep = (ms) => new Promise((resolve) => { setTimeout(resolve, ms); });

// All events of a stream.
async function all(stream) {
  const events = [];
  for await (const event of stream) events.push(event);
  return events;
}

// The error of a call that must fail.
async function failure(call) {
  try {
    await call();
  } catch (error) {
    return error;
  }
  return assert.fail("no error");
}

test("a response", async () => {
  const response = await respond();
  assert.ok(response.output_text.startsWith(ANSWER));
  assert.equal(response.status, "completed");
  assert.ok(response.usage.total_tokens > 10);
});

test("every event of a stream", async () => {
  const events = await all(await respond({ stream: true }));
  const deltas = events.filter((event) => event.type === "response.output_text.delta");
  assert.deepEqual(events.map((event) => event.type), [
    "response.created", "response.in_progress",
    "response.output_item.added", "response.content_part.added",
    ...deltas.map((event) => event.type),
    "response.output_text.done", "response.content_part.done",
    "response.output_item.done", "response.completed",
  ]);
  assert.deepEqual(events.map((event) => event.sequence_number), [...events.keys()]);
  const text = deltas.map((event) => event.delta).join("");
  assert.equal(text, (await respond()).output_text);
});

test("the streaming helper", async () => {
  let text = "";
  const stream = client.responses.stream(asked());
  stream.on("response.output_text.delta", (event) => { text += event.delta; });
  const final = await stream.finalResponse();
  assert.equal(final.output_text, text);
  assert.ok(text.startsWith(ANSWER));
});

test("a tool and its output", async () => {
  const question = { role: "user", content: "What is a dict?" };
  const fields = { tools: TOOLS, tool_choice: NAMED, parallel_tool_calls: false };
  const first = await respond({ input: [question], ...fields });
  const call = first.output.find((item) => item.type === "function_call");
  assert.ok(["dict", "list"].includes(JSON.parse(call.arguments).name));
  const output = { type: "function_call_output", call_id: call.call_id, output: "It maps." };
  const second = await respond({ input: [question, ...first.output, output], tools: TOOLS });
  assert.ok(second.usage.input_tokens > first.usage.input_tokens + 10);
});

test("a form, parsed", async () => {
  const format = { type: "json_schema", name: "found", strict: true, schema: LOOK_UP };
  const response = await client.responses.parse(asked({ text: { format } }));
  assert.ok(["dict", "list"].includes(response.output_parsed.name));
});

test("a conversation by id", async () => {
  const first = await respond();
  const second = await respond({ input: "What is a dict?", previous_response_id: first.id });
  assert.ok(second.usage.input_tokens > first.usage.input_tokens + 10);
  assert.equal((await client.responses.retrieve(first.id)).output_text, first.output_text);
  await client.responses.delete(first.id);
  assert.ok((await failure(() => client.responses.retrieve(first.id))) instanceof OpenAI.NotFoundError);
});

test("in the background", async () => {
  let response = await respond({ background: true });
  for (let i = 0; i < 200 && ["queued", "in_progress"].includes(response.status); i += 1) {
    await sleep(50);
    response = await client.responses.retrieve(response.id);
  }
  assert.equal(response.status, "completed");
  assert.ok(response.output_text.startsWith(ANSWER));
});

test("cancelled in the background", async () => {
  const started = await respond({ background: true, max_output_tokens: 1500, ignore_eos: true });
  assert.equal((await client.responses.cancel(started.id)).status, "cancelled");
});

test("errors", async () => {
  const wrong = await failure(() => respond({ temperature: 3 }));
  assert.ok(wrong instanceof OpenAI.BadRequestError);
  assert.equal(wrong.param, "temperature");
  const hosted = await failure(() => respond({ tools: [{ type: "web_search" }] }));
  assert.equal(hosted.param, "tools.0.type");
  const missing = await failure(() => respond({ model: "other" }));
  assert.equal(missing.code, "model_not_found");
});

test("aborting a stream", async () => {
  const stream = await respond({ stream: true, max_output_tokens: 1500, ignore_eos: true });
  let count = 0;
  for await (const event of stream) {
    assert.ok(event.type);
    if ((count += 1) === 8) break;
  }
  assert.equal(count, 8);
});
