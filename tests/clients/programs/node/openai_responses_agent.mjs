// An agent with the responses API of the package openai.
//
// node openai_responses_agent.mjs URL (whole | streamed) (stored | sent)
// stored: each request continues the stored response. sent: it sends the whole conversation.

import OpenAI from "openai";
import { FUNCTIONS, QUESTION, SYSTEM, runTool } from "./weather_tools.mjs";

const [url, how, where] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused" });
const tools = FUNCTIONS.map((each) => ({ type: "function", ...each }));
const calls = [];
let input = [{ role: "user", content: QUESTION }];
let previous = null;

for (;;) {
  const body = {
    model: "m",
    instructions: SYSTEM,
    input,
    tools,
    store: where === "stored",
    previous_response_id: previous,
  };
  const response =
    how === "streamed"
      ? await client.responses.stream(body).finalResponse()
      : await client.responses.create(body);
  const results = [];
  for (const item of response.output) {
    if (item.type !== "function_call") continue;
    calls.push([item.name, JSON.parse(item.arguments)]);
    const output = runTool(item.name, item.arguments);
    results.push({ type: "function_call_output", call_id: item.call_id, output });
  }
  if (!results.length) {
    console.log(JSON.stringify({ answer: response.output_text, calls }));
    break;
  }
  if (where === "stored") {
    previous = response.id;
    input = results;
  } else {
    input = [...input, ...response.output, ...results];
  }
}
