// openai-node: chat completions and Responses, whole and streamed; tools; Responses over a WebSocket.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { ResponsesWS } from "openai/resources/responses/ws";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: process.env.API_KEY, maxRetries: 0 });
const model = process.env.MODEL;
const messages = [{ role: "user", content: "Tell me something." }];
const tools = [{
  type: "function",
  function: { name: "get_weather", parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } },
}];

const whole = await client.chat.completions.create({ model, messages, temperature: 0, max_tokens: 20 });
const stream = client.chat.completions.stream({ model, messages, temperature: 0, max_tokens: 20, stream_options: { include_usage: true } });
const streamed = await stream.finalChatCompletion();
assert.equal(streamed.choices[0].message.content, whole.choices[0].message.content);
assert.equal(streamed.choices[0].finish_reason, "length");
assert.equal(streamed.usage.completion_tokens, 20);

const called = await client.chat.completions.stream({ model, messages, tools, tool_choice: "required" }).finalChatCompletion();
assert.equal(called.choices[0].finish_reason, "tool_calls");
assert.equal(typeof JSON.parse(called.choices[0].message.tool_calls[0].function.arguments).city, "string");

const response = await client.responses.create({ model, input: "Tell me something.", temperature: 0, max_output_tokens: 20 });
let deltas = "";
for await (const event of await client.responses.create({ model, input: "Tell me something.", temperature: 0, max_output_tokens: 20, stream: true })) {
  if (event.type === "response.output_text.delta") deltas += event.delta;
}
assert.equal(deltas, response.output_text);

const next = await client.responses.create({ model, input: "And then?", previous_response_id: response.id, max_output_tokens: 5 });
assert.equal(next.previous_response_id, response.id);

const socket = new ResponsesWS(client);
const said = await new Promise((resolve, reject) => {
  let text = "";
  socket.on("error", reject);
  socket.on("event", (event) => {
    if (event.type === "response.output_text.delta") text += event.delta;
    if (event.type === "response.incomplete" || event.type === "response.completed") resolve(text);
  });
  socket.send({ type: "response.create", model, input: "Tell me something.", temperature: 0, max_output_tokens: 20 });
});
socket.close();
assert.equal(said, response.output_text);

await assert.rejects(client.chat.completions.create({ model: "none", messages }), OpenAI.NotFoundError);
console.log("ok");
