// The question, the tools and the system prompt of the agents.

export const SYSTEM = "Use the tools.";
export const QUESTION = "How much warmer is Malmö than Oslo?";

const DEGREES = { Malmö: 14, Oslo: 10 };

export const getWeather = ({ city }) => String(DEGREES[city]);
export const add = ({ a, b }) => String(a + b);

export const runTool = (name, args) =>
  ({ get_weather: getWeather, add })[name](JSON.parse(args));

const object = (properties) => ({
  type: "object",
  properties,
  required: Object.keys(properties),
  additionalProperties: false,
});

export const FUNCTIONS = [
  {
    name: "get_weather",
    description: "The temperature of a city in degrees",
    parameters: object({ city: { type: "string" } }),
    strict: true,
  },
  {
    name: "add",
    description: "The sum of two numbers",
    parameters: object({ a: { type: "integer" }, b: { type: "integer" } }),
    strict: true,
  },
];
