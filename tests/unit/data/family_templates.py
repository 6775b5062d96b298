"""Chat templates with the layout that our families publish: roles, end tokens, tool calls, thinking. Each is as short as the layout allows.

A newline after a block is an expression, because blocks are rendered with the newline after them trimmed.
"""

_CALLS = "{% for call in m.tool_calls or [] %}"
_LAST_QUESTION = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)

CHATML = (
    "{% if tools %}<|im_start|>system\n# Tools{% for t in tools %}{{ '\n' }}{{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    + _CALLS
    + "<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen2, Qwen2.5, MiMo: results of tools are one turn of the user."""

QWEN3 = _LAST_QUESTION + CHATML.replace(
    "{{ m.content or '' }}",
    "{% set said = m.content or '' %}"
    "{% if m.role == 'assistant' %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in said else '' %}"
    "{% set said = said.split('</think>')[-1].lstrip() %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{% endif %}{{ said }}",
).replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
)
"""Drops the thinking of turns before the last question."""

LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}"
    "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n{{ m.content or '' }}"
    + _CALLS
    + "{{ call.function | tojson }}{% endfor %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

GLM4 = (
    "[gMASK]<sop>{% for m in messages %}{% if m.tool_calls %}"
    + _CALLS
    + "<|assistant|>{{ call.function.name }}\n{{ call.function.arguments | tojson }}{% endfor %}"
    "{% else %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""GLM-4-0414: only the next role's token ends a turn."""

GLM45 = (
    _LAST_QUESTION + "[gMASK]<sop>{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>"
    "\n<think>{{ m.reasoning_content if m.reasoning_content and loop.index0 > ns.last else '' }}</think>"
    "{% if m.content %}{{ '\n' }}{{ m.content }}{% endif %}"
    + _CALLS
    + "{{ '\n' }}<tool_call>{{ call.function.name }}{% for k, v in call.function.arguments.items() %}"
    "{{ '\n' }}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>{% endfor %}{{ '\n' }}</tool_call>{% endfor %}"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{{ '/nothink' if m.role == 'user' and enable_thinking is false }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is false %}{{ '\n' }}<think></think>{% endif %}{% endif %}"
)
"""GLM-4.5 and GLM-4.5-Air: every turn has a place for thinking; that of earlier turns is emptied."""

GLM47 = (
    GLM45.replace(
        "\n<think>{{ m.reasoning_content if m.reasoning_content and loop.index0 > ns.last else '' }}</think>",
        "{% if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}{% endif %}</think>",
    )
    .replace("{% if m.content %}{{ '\n' }}", "{% if m.content %}")
    .replace("|>\n{{ m.content }}{{ '/nothink' if m.role == 'user' and enable_thinking is false }}", "|>{{ m.content }}")
    .replace(
        "{% if enable_thinking is false %}{{ '\n' }}<think></think>{% endif %}",
        "{{ '</think>' if enable_thinking is false else '<think>' }}",
    )
)
"""GLM-4.7 and GLM-5: the generation prompt opens the thinking."""

DEEPSEEK_V3 = (
    "<｜begin▁of▁sentence｜>{% for m in messages %}"
    "{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% elif m.role == 'system' %}{{ m.content }}"
    "{% else %}<｜Assistant｜>{{ m.content }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
DEEPSEEK_R1 = DEEPSEEK_V3.replace("<｜Assistant｜>{{ m.content }}", "<｜Assistant｜>{{ m.content.split('</think>')[-1] }}").replace(
    "<｜Assistant｜>{% endif %}", "<｜Assistant｜><think>\n{% endif %}"
)
"""Drops the thinking of every turn, and opens it in the generation prompt."""

_KIMI_ROLE = "{{ m.name or m.role }}<|im_middle|>"
KIMI_K2 = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_{{ m.role if m.role in ['user', 'assistant'] else 'system' }}|>" + _KIMI_ROLE + "{% if m.role == 'tool' %}"
    "## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content or '' }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>"
    + _CALLS
    + "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
"""Kimi K2: a call shows its id alone, which the model wrote with the name of the tool in it."""

MINIMAX_M2 = (
    _LAST_QUESTION + "{% if tools %}]~b]system\n<tools>{% for t in tools %}{{ '\n' }}{{ t.function | tojson }}{% endfor %}</tools>\n"
    'Call: <minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke></minimax:tool_call>[e~[\n{% endif %}'
    "{% for m in messages %}{% if m.role == 'assistant' %}]~b]ai\n"
    "{% if m.reasoning_content and loop.index0 > ns.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content or '' }}{% if m.tool_calls %}{{ '\n' }}<minimax:tool_call>\n" + _CALLS + '<invoke name="{{ call.function.name }}">\n'
    "{% for k, v in call.function.arguments.items() %}"
    '<parameter name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</invoke>\n{% endfor %}'
    "</minimax:tool_call>{% endif %}[e~[\n"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}]~b]tool{% endif %}"
    "{{ '\n' }}<response>{{ m.content }}</response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}[e~[\n{% endif %}"
    "{% else %}]~b]{{ m.role }}\n{{ m.content }}[e~[\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}]~b]ai\n<think>\n{% endif %}"
)
"""MiniMax-M2: the generation prompt opens the thinking, and that of earlier turns is dropped."""

SPECIAL_TOKENS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
]
PLAIN_TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
"""Added tokens that tokenizers keep when they skip special ones."""
