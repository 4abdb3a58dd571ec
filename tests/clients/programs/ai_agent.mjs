// An agent with the AI SDK, which runs the tools itself.
//
// node ai_agent.mjs URL (compatible | chat | responses) (whole | streamed)

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { QUESTION, SYSTEM, add, getWeather } from "./weather_tools.mjs";

const [url, api, how] = process.argv.slice(2);
const baseURL = `${url}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "unused" });
const model = {
  compatible: () => createOpenAICompatible({ name: "baton", baseURL })("m"),
  chat: () => openai.chat("m"),
  responses: () => openai.responses("m"),
}[api]();

const calls = [];
const recorded = (name, run) => (args) => {
  calls.push([name, args]);
  return run(args);
};
const tools = {
  get_weather: tool({
    description: "The temperature of a city in degrees",
    inputSchema: z.object({ city: z.string() }),
    execute: recorded("get_weather", getWeather),
  }),
  add: tool({
    description: "The sum of two numbers",
    inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
    execute: recorded("add", add),
  }),
};

const options = { model, system: SYSTEM, prompt: QUESTION, tools, stopWhen: stepCountIs(10) };
const result = how === "streamed" ? streamText(options) : await generateText(options);
const answer = await result.text;
const steps = await result.steps;
const reasoning = steps.map((step) => step.reasoningText ?? "").join("");
console.log(JSON.stringify({ answer, calls, reasoning }));
