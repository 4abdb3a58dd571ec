// An object as the final answer of an agent with the AI SDK.
//
// node ai_output.mjs URL (compatible | chat | responses | messages) (whole | streamed)

import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { createModel } from "./ai_models.mjs";
import { getWeather } from "./weather_tools.mjs";

const [url, api, how] = process.argv.slice(2);
const run = how === "streamed" ? streamText : generateText;
const tools = {
  get_weather: tool({
    description: "The temperature of a city in degrees",
    inputSchema: z.object({ city: z.string() }),
    execute: getWeather,
  }),
};
const result = await run({
  model: createModel(url, api),
  prompt: "Write the weather of Malmö as an object.",
  tools,
  output: Output.object({ schema: z.object({ city: z.string(), degrees: z.number() }) }),
  stopWhen: stepCountIs(10),
});
console.log(JSON.stringify(await result.output));
