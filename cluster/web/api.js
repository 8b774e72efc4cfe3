// How the page talks to its server: the key, errors as sentences, server-sent events.
// Knows nothing of what is on the page.

const KEY_NAME = "phalanx-api-key";
let key = stored();

function stored() {
  try {
    return sessionStorage.getItem(KEY_NAME) ?? "";
  } catch { // storage is off in this browser: the key then lives as long as the page
    return "";
  }
}

export function setKey(value) {
  key = value;
  try {
    sessionStorage.setItem(KEY_NAME, value);
  } catch { /* as above */ }
}

export const hasKey = () => key !== "";

export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status; // 0: no answer at all
  }
}

// fetch() that sends the key and throws a ServerError for everything that is not a good answer,
// except what the signal in `options` ends. Paths are relative: a proxy may put a prefix before us.
export async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ServerError("The server does not answer.");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

async function failure(response) {
  let text = "";
  try {
    text = (await response.json()).error.message;
  } catch { /* not our envelope, perhaps a proxy's page */ }
  if (typeof text !== "string" || !text) {
    text = `The server answered ${response.status} ${response.statusText}`.trim();
  }
  const wait = Number(response.headers.get("retry-after"));
  if (wait > 0) text += ` (try again in ${wait} s)`;
  return new ServerError(text, response.status);
}

// The JSON items of an event stream. An error item and a stream without its end throw.
export async function* items(response, signal) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await read(reader, signal);
    if (done) throw new ServerError("The connection ended before the answer was complete.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const item = JSON.parse(data);
      if (item.error) throw new ServerError(item.error.message ?? "The server reports an error.");
      yield item;
    }
  }
}

async function read(reader, signal) {
  try {
    return await reader.read();
  } catch (error) {
    if (signal.aborted) throw error;
    throw new ServerError("The connection broke before the answer was complete.");
  }
}
