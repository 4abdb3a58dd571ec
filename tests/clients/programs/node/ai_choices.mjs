// The text and the calls of the AI SDK's answers, for each choice of tools.
//
// node ai_choices.mjs URL (compatible | chat | responses | messages) (whole | streamed)

import { generateText, jsonSchema, streamText, tool } from "ai";
import { SINGLE, createModel } from "./ai_models.mjs";
import { FUNCTIONS } from "./weather_tools.mjs";

const [url, api, how] = process.argv.slice(2);
const run = how === "streamed" ? streamText : generateText;
const model = createModel(url, api);
const tools = Object.fromEntries(
  FUNCTIONS.map(({ name, description, parameters }) => [
    name,
    tool({ description, inputSchema: jsonSchema(parameters) }),
  ]),
);
const choices = {
  auto: { toolChoice: "auto" },
  parallel: { toolChoice: "auto" },
  alone: { toolChoice: "auto", ...SINGLE },
  required: { toolChoice: "required" },
  named: { toolChoice: { type: "tool", toolName: "add" } },
  none: { toolChoice: "none" },
  single: { toolChoice: "required", ...SINGLE },
};
const read = {};
for (const [word, options] of Object.entries(choices)) {
  const answer = await run({ model, prompt: `The choice is ${word}.`, tools, ...options });
  const calls = (await answer.toolCalls).map((call) => call.toolName);
  read[word] = { content: await answer.text, calls };
}
console.log(JSON.stringify(read));
