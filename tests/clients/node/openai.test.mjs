// The official Node client against a real server: PHALANX_URL is its base URL. Run by test_node.py.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";

const url = process.env.PHALANX_URL;
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused", maxRetries: 0 });

const HELLO = [{ role: "user", content: "Hello" }];
const ANSWER = "Hello! I am a small demo model served by Phalanx.";
const TOPIC = "In Python, a generator";
const LOOK_UP = {
  type: "object",
  properties: { name: { enum: ["dict", "list"] }, deep: { type: "boolean" } },
  required: ["name", "deep"],
  additionalProperties: false,
};
const TOOLS = [{ type: "function", function: { name: "look_up", parameters: LOOK_UP } }];

const completion = (fields) => ({
  model: "demo", prompt: TOPIC, temperature: 0, max_tokens: 8, ...fields,
});
const chat = (fields) => ({ model: "demo", messages: HELLO, temperature: 0, ...fields });
const complete = (fields) => client.completions.create(completion(fields));
const say = (fields) => client.chat.completions.create(chat(fields));

// All items of a stream.
async function all(stream) {
  const items = [];
  for await (const item of stream) items.push(item);
  return items;
}

// Until the server has nothing to do: within a second.
async function free() {
  const deadline = Date.now() + 1000;
  for (;;) {
    const text = await (await fetch(`${url}/metrics`)).text();
    const gauges = text.split("\n").filter((line) =>
      /^phalanx:(num_requests_(running|waiting)|kv_cache_usage_perc)\{/.test(line));
    assert.ok(gauges.length >= 6);
    if (gauges.every((line) => Number(line.split(" ").at(-1)) === 0)) return;
    assert.ok(Date.now() < deadline, gauges.join("\n"));
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
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

test("models", async () => {
  const { data } = await client.models.list();
  assert.deepEqual(data.map((model) => model.id), ["demo"]);
  assert.equal((await client.models.retrieve("demo")).owned_by, "phalanx");
});

test("a greedy completion is the same twice", async () => {
  const [first, second] = [await complete(), await complete()];
  assert.deepEqual(first.choices, second.choices);
  assert.equal(first.choices[0].finish_reason, "length");
  assert.deepEqual([first.usage.prompt_tokens, first.usage.completion_tokens], [5, 8]);
});

test("several prompts and choices", async () => {
  const { choices, usage } = await complete({
    prompt: [TOPIC, "x"], n: 2, temperature: 1.5, seed: 4,
  });
  assert.deepEqual(choices.map((choice) => choice.index), [0, 1, 2, 3]);
  assert.equal(usage.completion_tokens, 32);
  const alone = await complete({ temperature: 1.5, seed: 4 });
  assert.equal(choices[0].text, alone.choices[0].text);
  assert.notEqual(choices[1].text, choices[0].text);
});

test("a streamed completion adds up", async () => {
  const whole = await complete();
  const items = await all(await complete({ stream: true, stream_options: { include_usage: true } }));
  const text = items.map((item) => item.choices[0]?.text ?? "").join("");
  assert.equal(text, whole.choices[0].text);
  assert.equal(items.at(-1).usage.completion_tokens, 8);
});

test("a stop string is not in the text", async () => {
  const { text } = (await complete({ max_tokens: 20 })).choices[0];
  const stop = text.slice(7, 12);
  const [choice] = (await complete({ max_tokens: 20, stop: [stop] })).choices;
  assert.equal(choice.text, text.slice(0, text.indexOf(stop)));
  assert.equal(choice.finish_reason, "stop");
});

test("logit_bias ends it at once", async () => {
  const { choices, usage } = await complete({ logit_bias: { 2: 100 } });
  assert.deepEqual([choices[0].text, choices[0].finish_reason], ["", "stop"]);
  assert.equal(usage.completion_tokens, 1);
});

test("logprobs and echo", async () => {
  const { text, logprobs } = (await complete({ echo: true, logprobs: 2 })).choices[0];
  assert.ok(text.startsWith(TOPIC));
  assert.equal(logprobs.tokens.join(""), text);
  assert.equal(logprobs.token_logprobs[0], null);
  assert.ok(logprobs.token_logprobs.slice(1).every((value) => value < 0));
});

test("fields of other servers", async () => {
  const greedy = await complete();
  const narrow = await complete({ temperature: 1.9, top_k: 1, ignore_eos: true, min_tokens: 2 });
  assert.equal(narrow.choices[0].text, greedy.choices[0].text);
});

test("chat answers what it learned", async () => {
  const { choices, usage } = await say();
  assert.ok(choices[0].message.content.startsWith(ANSWER));
  assert.equal(choices[0].finish_reason, "stop");
  assert.equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens);
});

test("a streamed chat adds up", async () => {
  const items = await all(await say({ stream: true }));
  assert.equal(items[0].choices[0].delta.role, "assistant");
  const text = items.map((item) => item.choices[0].delta.content ?? "").join("");
  assert.equal(text, (await say()).choices[0].message.content);
  assert.equal(items.at(-1).choices[0].finish_reason, "stop");
});

test("the streaming helper", async () => {
  const runner = client.chat.completions.stream(chat());
  let text = "";
  runner.on("content", (delta) => { text += delta; });
  const final = await runner.finalChatCompletion();
  assert.equal(final.choices[0].message.content, text);
  assert.ok(text.startsWith(ANSWER));
});

test("chat logprobs", async () => {
  const { message, logprobs } = (await say({ logprobs: true, top_logprobs: 2 })).choices[0];
  const text = logprobs.content.slice(0, -1).map((item) => item.token).join("");
  assert.equal(text, message.content);
  assert.ok(logprobs.content.every((item) => item.top_logprobs.length === 2));
});

test("characters that are several tokens", async () => {
  const word = "\u20ac \u{1f600} \u4e2d";
  const items = await all(await complete({ stream: true, max_tokens: 40, guided_choice: [word] }));
  const texts = items.map((item) => item.choices[0].text);
  assert.equal(texts.join(""), word);
  assert.ok(texts.every((text) => !/[\ufffd]|[\ud800-\udbff]$/u.test(text)));
});

test("json_schema", async () => {
  const { message, finish_reason: reason } = (await say({
    max_tokens: 60,
    response_format: { type: "json_schema", json_schema: { name: "a", schema: LOOK_UP } },
    structured_outputs: { disable_any_whitespace: true },
  })).choices[0];
  const value = JSON.parse(message.content);
  assert.equal(reason, "stop");
  assert.ok(["dict", "list"].includes(value.name) && typeof value.deep === "boolean");
});

test("json_object", async () => {
  const answer = await say({ max_tokens: 200, response_format: { type: "json_object" } });
  assert.equal(typeof JSON.parse(answer.choices[0].message.content), "object");
});

test("a named tool", async () => {
  const choice = { type: "function", function: { name: "look_up" } };
  const answer = await say({ tools: TOOLS, tool_choice: choice, max_tokens: 120 });
  const [call] = answer.choices[0].message.tool_calls;
  assert.equal(call.function.name, "look_up");
  assert.ok(["dict", "list"].includes(JSON.parse(call.function.arguments).name));
});

test("streamed tool calls", async () => {
  const runner = client.chat.completions.stream(chat({
    tools: TOOLS, tool_choice: "required", parallel_tool_calls: false, max_tokens: 120,
  }));
  const message = await runner.finalMessage();
  const [call] = message.tool_calls;
  assert.match(call.id, /^call_/);
  assert.equal(typeof JSON.parse(call.function.arguments).deep, "boolean");
});

test("the helper that runs tools", async () => {
  const seen = [];
  const lookUp = (args) => {
    seen.push(args);
    return "A dict maps keys to values.";
  };
  const runner = client.chat.completions.runTools(chat({
    tools: [{
      type: "function",
      function: { name: "look_up", parameters: LOOK_UP, function: lookUp, parse: JSON.parse },
    }],
    tool_choice: { type: "function", function: { name: "look_up" } },
    parallel_tool_calls: false,
    max_tokens: 120,
  }));
  await runner.done();
  assert.equal(seen.length, 1);
  assert.equal(typeof seen[0].deep, "boolean");
  assert.equal(runner.messages.at(-1).role, "tool");
});

test("wrong fields", async () => {
  const error = await failure(() => say({ temperature: 3 }));
  assert.ok(error instanceof OpenAI.BadRequestError);
  assert.deepEqual([error.status, error.param, error.type], [400, "temperature", "invalid_request_error"]);
  assert.ok(error.requestID);
});

test("no such model", async () => {
  const error = await failure(() => complete({ model: "gpt-9" }));
  assert.ok(error instanceof OpenAI.NotFoundError);
  assert.equal(error.code, "model_not_found");
});

test("too long a prompt", async () => {
  const error = await failure(() => complete({ prompt: "x ".repeat(3000) }));
  assert.equal(error.code, "context_length_exceeded");
});

test("a broken schema says where", async () => {
  const schema = { type: "object", properties: { a: { type: "strin" } } };
  const error = await failure(() => say({
    response_format: { type: "json_schema", json_schema: { name: "a", schema } },
  }));
  assert.equal(error.param, "response_format.json_schema.schema.properties.a");
});

test("leaving a stream frees its request", async () => {
  const stream = await complete({ stream: true, max_tokens: 2000, ignore_eos: true });
  let count = 0;
  for await (const item of stream) {
    assert.equal(item.object, "text_completion");
    if ((count += 1) === 3) break;
  }
  await free();
});

test("aborting a whole answer frees its request", async () => {
  const controller = new AbortController();
  const answer = client.completions.create(
    completion({ max_tokens: 2000, n: 3, ignore_eos: true }), { signal: controller.signal },
  );
  setTimeout(() => controller.abort(), 150);
  assert.ok((await failure(() => answer)) instanceof OpenAI.APIUserAbortError);
  await free();
});

test("a timeout frees its request", async () => {
  const body = completion({ max_tokens: 2000, ignore_eos: true });
  const error = await failure(() => client.completions.create(body, { timeout: 200 }));
  assert.ok(error instanceof OpenAI.APIConnectionTimeoutError);
  await free();
});

test("many at once", async () => {
  const seeds = [...Array(16).keys()].map((i) => i % 4);
  const answers = await Promise.all(seeds.map((seed) => complete({ seed, temperature: 1 })));
  const texts = answers.map((answer) => answer.choices[0].text);
  for (const seed of [0, 1, 2, 3]) {
    assert.equal(new Set(texts.filter((_, i) => seeds[i] === seed)).size, 1);
  }
  assert.equal(new Set(texts).size, 4);
});

test("raw responses", async () => {
  const { data, response } = await client.chat.completions
    .create(chat({ max_tokens: 2 }), { headers: { "x-request-id": "from-node" } }).withResponse();
  assert.equal(response.headers.get("x-request-id"), "from-node");
  assert.equal(data.usage.completion_tokens, 2);
});
