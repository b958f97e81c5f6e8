// Vercel's AI SDK: its OpenAI provider (Responses and chat) and its provider for compatible platforms.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText, tool } from "ai";
import { z } from "zod";

const settings = { baseURL: process.env.BASE_URL, apiKey: process.env.API_KEY };
const openai = createOpenAI(settings);
const compatible = createOpenAICompatible({ ...settings, name: "forebay", includeUsage: true });
const models = {
  responses: openai.responses(process.env.MODEL),
  chat: openai.chat(process.env.MODEL),
  compatible: compatible(process.env.MODEL),
};
const tools = { get_weather: tool({ description: "The weather", inputSchema: z.object({ city: z.string() }) }) };

for (const [name, model] of Object.entries(models)) {
  const asked = { model, prompt: "Tell me something.", temperature: 0, maxOutputTokens: 20, maxRetries: 0 };
  const whole = await generateText(asked);
  assert.equal(whole.usage.outputTokens, 20, name);
  const stream = streamText(asked);
  let text = "";
  for await (const delta of stream.textStream) text += delta;
  assert.equal(text, whole.text, name);
  assert.equal(await stream.finishReason, "length", name);
  assert.equal((await stream.usage).outputTokens, 20, name);
  const called = await generateText({ ...asked, maxOutputTokens: 200, tools, toolChoice: "required" });
  assert.equal(called.toolCalls[0].toolName, "get_weather", name);
  assert.equal(typeof called.toolCalls[0].input.city, "string", name);
}
console.log("ok");
