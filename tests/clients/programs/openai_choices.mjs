// The choices of tools of the package openai.
//
// node openai_choices.mjs URL (chat | responses) (whole | streamed)

import OpenAI from "openai";
import { FUNCTIONS } from "./weather_tools.mjs";

const [url, api, how] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused" });

async function chat(content, options) {
  const tools = FUNCTIONS.map((each) => ({ type: "function", function: each }));
  const body = { model: "m", messages: [{ role: "user", content }], tools, ...options };
  const completion =
    how === "streamed"
      ? await client.chat.completions.stream(body).finalChatCompletion()
      : await client.chat.completions.create(body);
  return (completion.choices[0].message.tool_calls ?? []).map((call) => call.function.name);
}

async function responses(content, options) {
  const tools = FUNCTIONS.map((each) => ({ type: "function", ...each }));
  const body = { model: "m", input: content, tools, ...options };
  const response =
    how === "streamed"
      ? await client.responses.stream(body).finalResponse()
      : await client.responses.create(body);
  return response.output.filter((item) => item.type === "function_call").map((item) => item.name);
}

const add =
  api === "chat" ? { type: "function", function: { name: "add" } } : { type: "function", name: "add" };
const choices = {
  auto: { tool_choice: "auto" },
  required: { tool_choice: "required" },
  named: { tool_choice: add },
  none: { tool_choice: "none" },
  single: { tool_choice: "required", parallel_tool_calls: false },
};
const ask = { chat, responses }[api];
const chosen = {};
for (const [word, options] of Object.entries(choices)) {
  chosen[word] = await ask(`The choice is ${word}.`, options);
}
console.log(JSON.stringify(chosen));
