// An object as the final answer of an agent with the AI SDK, and the choices of tools.
//
// node ai_output.mjs URL (compatible | chat | responses) (whole | streamed)

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { getWeather } from "./weather_tools.mjs";

const [url, api, how] = process.argv.slice(2);
const run = how === "streamed" ? streamText : generateText;
const baseURL = `${url}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "unused" });
const compatible = createOpenAICompatible({
  name: "baton",
  baseURL,
  supportsStructuredOutputs: true,
});
const model = {
  compatible: () => compatible("m"),
  chat: () => openai.chat("m"),
  responses: () => openai.responses("m"),
}[api]();
const tools = {
  get_weather: tool({
    description: "The temperature of a city in degrees",
    inputSchema: z.object({ city: z.string() }),
    execute: getWeather,
  }),
};

const result = await run({
  model,
  prompt: "Write the weather of Malmö as an object.",
  tools,
  output: Output.object({ schema: z.object({ city: z.string(), degrees: z.number() }) }),
  stopWhen: stepCountIs(10),
});
const output = await result.output;

const choices = {
  auto: { toolChoice: "auto" },
  required: { toolChoice: "required" },
  named: { toolChoice: { type: "tool", toolName: "get_weather" } },
  none: { toolChoice: "none" },
  single: {
    toolChoice: "required",
    providerOptions: {
      openai: { parallelToolCalls: false },
      baton: { parallel_tool_calls: false }, // of createOpenAICompatible({ name: "baton" })
    },
  },
};
const chosen = {};
for (const [word, options] of Object.entries(choices)) {
  const answer = await run({ model, prompt: `The choice is ${word}.`, tools, ...options });
  chosen[word] = (await answer.toolCalls).map((call) => call.toolName);
}
console.log(JSON.stringify({ output, chosen }));
