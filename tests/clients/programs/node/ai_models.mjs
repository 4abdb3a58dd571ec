// A model of the AI SDK for each of the gateway's APIs.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";

// api: compatible, chat, responses or messages.
export function createModel(url, api) {
  const options = { baseURL: `${url}/v1`, apiKey: "unused" };
  const openai = createOpenAI(options);
  const compatible = createOpenAICompatible({
    name: "baton",
    supportsStructuredOutputs: true,
    ...options,
  });
  return {
    compatible: () => compatible("m"),
    chat: () => openai.chat("m"),
    responses: () => openai.responses("m"),
    messages: () => createAnthropic(options)("m"),
  }[api]();
}

// The options of a request whose answer has at most one call.
export const SINGLE = {
  providerOptions: {
    anthropic: { disableParallelToolUse: true },
    openai: { parallelToolCalls: false },
    baton: { parallel_tool_calls: false }, // of createOpenAICompatible({ name: "baton" })
  },
};
