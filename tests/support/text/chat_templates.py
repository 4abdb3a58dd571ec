"""Chat templates in the formats of the families of models, by the name of the tool parser.

For the parity test of chat templates.
"""

from __future__ import annotations

_HERMES = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>\\n\\nA call is <tool_call>\\n{"name": NAME, "arguments": {}}\\n</tool_call>' }}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=0) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' and message.content is string and not ns.last_query %}
        {%- set ns.last_query = (messages | length - 1) - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is defined and loop.index0 < ns.last_query %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {%- if message.content %}
            {{- message.content.split('</think>')[-1].lstrip('\\n') }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {%- if call.arguments is string %}
                {{- call.arguments }}
            {%- else %}
                {{- call.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

_LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + date_string + '\\n\\n' }}
{{- system_message + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if loop.first and tools is not none %}
        {{- '<|start_header_id|>user<|end_header_id|>\\n\\nRespond with {"name": NAME, ' }}
        {{- '"parameters": {}}.\\n\\n' }}
        {%- for tool in tools %}
            {{- tool | tojson(indent=4) }}
            {{- '\\n\\n' }}
        {%- endfor %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {%- for call in message.tool_calls %}
            {{- '; ' if not loop.first }}
            {{- '{"name": "' + call.function.name + '", "parameters": ' }}
            {{- call.function.arguments | tojson + '}' }}
        {%- endfor %}
        {{- '<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- endif %}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

_PYTHONIC = """\
{{- bos_token }}
{%- macro literal(value) %}
    {%- if value is none %}None{% elif value is sameas true %}True{% elif value is sameas false %}
        {{- 'False' }}
    {%- else %}{{ value | tojson }}{% endif %}
{%- endmacro %}
{%- for message in messages %}
    {{- '<|header_start|>' + message.role + '<|header_end|>\\n\\n' }}
    {%- if loop.first and tools %}
        {{- tools | tojson(indent=2) + '\\n' }}
    {%- endif %}
    {{- message.content or '' }}
    {%- if message.tool_calls %}
        {{- '<|python_start|>[' }}
        {%- for call in message.tool_calls %}
            {{- ', ' if not loop.first }}
            {{- call.function.name + '(' }}
            {%- for name, value in call.function.arguments | items %}
                {{- name + '=' + literal(value) }}
                {{- ', ' if not loop.last }}
            {%- endfor %}
            {{- ')' }}
        {%- endfor %}
        {{- ']<|python_end|>' }}
    {%- endif %}
    {{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header_start|>assistant<|header_end|>\\n\\n' }}{%- endif %}"""

_MISTRAL = """\
{{- bos_token }}
{%- set user_messages = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and message == user_messages[-1] %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in tool.function.items() if key != 'return' %}
                    {{- '"' + key + '": ' }}
                    {%- if value is string %}{{- '"' + value + '"' }}
                    {%- else %}{{- value | tojson }}{%- endif %}
                    {{- ', ' if not loop.last }}
                {%- endfor %}
                {{- '}}' + (', ' if not loop.last else ']') }}
            {%- endfor %}
            {{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', ' }}
        {%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
            {{- raise_exception('Tool call IDs must have 9 characters') }}
        {%- endif %}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- elif message.tool_calls is defined %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}
            {{- out[:-1] + ', "id": "' + call.id + '"}' + (', ' if not loop.last else ']') }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- else %}
        {{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
    {%- endif %}
{%- endfor %}"""

_MISTRAL_ARGS = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if message.reasoning_content %}
            {{- '[THINK]' + message.reasoning_content + '[/THINK]' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls | default([]) %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}
            {{- call.function.arguments | tojson(sort_keys=true) }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
    {%- else %}
        {%- if loop.first and tools %}
            {{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- endif %}
{%- endfor %}"""

_DEEPSEEK_V3 = """\
{%- set ns = namespace(is_first=false, is_tool=false, system_prompt='') %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {%- set ns.system_prompt = message['content'] %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}{{- ns.system_prompt }}
{%- if tools %}{{- '\\n\\n' + tools | tojson(separators=(',', ':')) }}{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- set ns.is_tool = false %}
        {{- '<｜User｜>' + message['content'] }}
    {%- elif message['role'] == 'assistant' and 'tool_calls' in message %}
        {%- set ns.is_tool = false %}
        {{- '<｜Assistant｜>' + (message['content'] or '') }}
        {%- for call in message['tool_calls'] %}
            {{- '<｜tool▁calls▁begin｜>' if loop.first else '\\n' }}
            {{- "<｜tool▁call▁begin｜>" + call["type"] + "<｜tool▁sep｜>" }}
            {{- call["function"]["name"] }}
            {{- '\\n```json\\n' + call['function']['arguments'] + '\\n```' }}
            {{- '<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'assistant' %}
        {%- if ns.is_tool %}
            {{- '<｜tool▁outputs▁end｜>' }}
        {%- else %}
            {{- '<｜Assistant｜>' }}
        {%- endif %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1] %}
        {%- endif %}
        {{- content + '<｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'tool' %}
        {{- '\\n' if ns.is_tool else '<｜tool▁outputs▁begin｜>' }}
        {%- set ns.is_tool = true %}
        {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if ns.is_tool %}{{- '<｜tool▁outputs▁end｜>' }}{%- endif %}
{%- if add_generation_prompt and not ns.is_tool %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}"""

_DEEPSEEK_V31 = """\
{{- bos_token }}
{%- if tools is defined and tools is not none %}
    {%- for tool in tools %}
        {{- '### ' + tool.function.name + '\\nDescription: ' + tool.function.description }}
        {{- '\\nParameters: ' + tool.function.parameters | tojson + '\\n' }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<｜Assistant｜></think>' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- if loop.first %}
                {{- '<｜tool▁calls▁begin｜>' }}
            {%- endif %}
            {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}
            {{- '' + call.function.arguments + '<｜tool▁call▁end｜>' }}
            {%- if loop.last %}{{- '<｜tool▁calls▁end｜>' }}{%- endif %}
        {%- endfor %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- elif message.role == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<｜Assistant｜>' + ('<think>' if thinking is defined and thinking else '</think>') }}
{%- endif %}"""

_GPTOSS = """\
{%- macro type_of(schema) -%}
    {%- if schema.enum %}{{ '"' + schema.enum | join('" | "') + '"' }}
    {%- elif schema.type == 'array' %}{{ type_of(schema['items']) + '[]' }}
    {%- elif schema.type in ['integer', 'number'] %}number
    {%- else %}{{ schema.type }}{% endif %}
{%- endmacro -%}
{{- '<|start|>system<|message|>Reasoning: ' + reasoning_effort | default('medium') + '\\n\\n' }}
{{- '# Valid channels: analysis, commentary, final.<|end|>' }}
{%- if tools or messages[0].role == 'system' %}
    {{- '<|start|>developer<|message|>' }}
    {%- if messages[0].role == 'system' %}
        {{- '# Instructions\\n\\n' + messages[0].content + '\\n\\n' }}
    {%- endif %}
    {%- if tools %}
        {{- '# Tools\\n\\nnamespace functions {\\n\\n' }}
        {%- for tool in tools %}
            {%- set tool = tool.function %}
            {{- '// ' + tool.description + '\\ntype ' + tool.name + ' = (_: {\\n' }}
            {%- for name, schema in tool.parameters.properties.items() %}
                {{- name + ('' if name in tool.parameters.required else '?') + ': ' }}
                {{- type_of(schema) + ',\\n' }}
            {%- endfor %}
            {{- '}) => any;\\n\\n' }}
        {%- endfor %}
        {{- '} // namespace functions' }}
    {%- endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- if message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- elif message.content %}
            {{- '<|start|>assistant<|channel|>commentary<|message|>' + message.content }}
            {{- '<|end|>' }}
        {%- endif %}
        {%- for call in message.tool_calls %}
            {%- set call = call.function %}
            {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json' }}
            {{- '<|message|>' + call.arguments | tojson + '<|call|>' }}
            {%- set last.name = call.name %}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {%- if last.name is none %}{{- raise_exception('no call before the result') }}{%- endif %}
        {{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson + '<|end|>' }}
    {%- elif message.role == 'user' %}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

_JSON = """\
{{- tools | tojson if tools }}
{%- for message in messages %}
    {{- '\\n' + message.role | upper + ': ' + (message.content or '') }}
    {%- if message.tool_calls %}
        {{- message.tool_calls | map(attribute='function') | list | tojson }}
    {%- endif %}
    {%- if message.role == 'user' %}{% continue %}{% endif %}
    {%- generation %}{{- '' }}{%- endgeneration %}
{%- endfor %}
{{- '\\nASSISTANT: ' if add_generation_prompt }}"""

#: Tool parser -> (template, texts before and after an assistant's message). DeepSeek's templates
#: expect the arguments of calls as JSON text, the others as an object.
CHAT_TEMPLATES = {
    "hermes": (_HERMES, "<|im_start|>assistant\n", "<|im_end|>"),
    "llama3_json": (_LLAMA3, "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    "pythonic": (_PYTHONIC, "<|header_start|>assistant<|header_end|>\n\n", "<|eot|>"),
    "mistral": (_MISTRAL, "", "</s>"),
    "mistral_args": (_MISTRAL_ARGS, "", "</s>"),
    "deepseek_v3": (_DEEPSEEK_V3, "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    "deepseek_v31": (_DEEPSEEK_V31, "<｜Assistant｜></think>", "<｜end▁of▁sentence｜>"),
    "gptoss": (_GPTOSS, "<|start|>assistant", "<|call|>"),
    "json": (_JSON, "\nASSISTANT: ", "\nTOOL: "),
}
