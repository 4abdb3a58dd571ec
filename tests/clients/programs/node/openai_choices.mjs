// The text and the calls of the openai package's answers, for each choice of tools.
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
  const message = completion.choices[0].message;
  const calls = (message.tool_calls ?? []).map((call) => call.function.name);
  return { content: message.content ?? "", calls };
}

async function responses(content, options) {
  const tools = FUNCTIONS.map((each) => ({ type: "function", ...each }));
  const body = { model: "m", input: content, tools, ...options };
  const response =
    how === "streamed"
      ? await client.responses.stream(body).finalResponse()
      : await client.responses.create(body);
  const calls = response.output.filter((item) => item.type === "function_call");
  return { content: response.output_text, calls: calls.map((call) => call.name) };
}

const add =
  api === "chat" ? { type: "function", function: { name: "add" } } : { type: "function", name: "add" };
const choices = {
  auto: { tool_choice: "auto" },
  parallel: { tool_choice: "auto" },
  alone: { tool_choice: "auto", parallel_tool_calls: false },
  required: { tool_choice: "required" },
  named: { tool_choice: add },
  none: { tool_choice: "none" },
  single: { tool_choice: "required", parallel_tool_calls: false },
};
const ask = { chat, responses }[api];
const read = {};
for (const [word, options] of Object.entries(choices)) {
  read[word] = await ask(`The choice is ${word}.`, options);
}
console.log(JSON.stringify(read));
