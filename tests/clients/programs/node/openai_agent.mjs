// An agent with the package openai, which calls tools until it has the answer.
//
// node openai_agent.mjs URL (whole | streamed | run_tools | run_tools_streamed)

import OpenAI from "openai";
import { FUNCTIONS, QUESTION, SYSTEM, add, getWeather, runTool } from "./weather_tools.mjs";

const [url, how] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused" });
const messages = [
  { role: "system", content: SYSTEM },
  { role: "user", content: QUESTION },
];
const calls = [];

async function loop() {
  const tools = FUNCTIONS.map((each) => ({ type: "function", function: each }));
  for (;;) {
    const body = { model: "m", messages, tools };
    const completion =
      how === "streamed"
        ? await client.chat.completions.stream(body).finalChatCompletion()
        : await client.chat.completions.create(body);
    const message = completion.choices[0].message;
    messages.push(message);
    if (!message.tool_calls?.length) return message.content;
    for (const call of message.tool_calls) {
      const { name, arguments: args } = call.function;
      calls.push([name, JSON.parse(args)]);
      messages.push({ role: "tool", tool_call_id: call.id, content: runTool(name, args) });
    }
  }
}

async function runTools() {
  const recorded = (name, tool) => (args) => {
    calls.push([name, args]);
    return tool(args);
  };
  const tools = FUNCTIONS.map(({ strict, ...each }) => ({
    type: "function",
    function: {
      ...each,
      parse: JSON.parse,
      function: recorded(each.name, { get_weather: getWeather, add }[each.name]),
    },
  }));
  const stream = how === "run_tools_streamed";
  return client.chat.completions
    .runTools({ model: "m", messages, tools, stream })
    .finalContent();
}

const answer = await (how.startsWith("run_tools") ? runTools() : loop());
console.log(JSON.stringify({ answer, calls }));
