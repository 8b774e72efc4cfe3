// The example tool: the clock of this browser. The model calls it, the page runs it and sends its result back.
// Knows nothing of what is on the page.

export const CLOCK = {
  type: "function",
  function: {
    name: "get_time",
    description: "The current date and time.",
    parameters: {
      type: "object",
      properties: { zone: { type: "string", enum: ["UTC", "local"] } },
      required: ["zone"],
      additionalProperties: false,
    },
  },
};

// The result of a call {name, arguments}, as text for the model; errors too, so that it can try again.
export function runTool(call) {
  if (call.name !== CLOCK.function.name) return `error: there is no function ${call.name}`;
  try {
    const now = new Date();
    return JSON.parse(call.arguments).zone === "UTC" ? now.toUTCString() : now.toString();
  } catch (error) {
    return `error: ${error.message}`;
  }
}
