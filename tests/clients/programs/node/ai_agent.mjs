// An agent with the AI SDK, which runs the tools itself.
//
// node ai_agent.mjs URL (compatible | chat | responses | messages) (whole | streamed)

import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { createModel } from "./ai_models.mjs";
import { QUESTION, SYSTEM, add, getWeather } from "./weather_tools.mjs";

const [url, api, how] = process.argv.slice(2);

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

const options = {
  model: createModel(url, api),
  system: SYSTEM,
  prompt: QUESTION,
  tools,
  stopWhen: stepCountIs(10),
};
const result = how === "streamed" ? streamText(options) : await generateText(options);
const answer = await result.text;
const steps = await result.steps;
const reasoning = steps.map((step) => step.reasoningText ?? "").join("");
console.log(JSON.stringify({ answer, calls, reasoning }));
