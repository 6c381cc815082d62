"""Chat templates in the manner of the families that mtpkit reads: what they accept, add and leave
out."""

LAST_QUESTION = (
    "{% set ns = namespace(last=-1, is_tool=false) %}{% for m in messages %}{% if m.role == 'user'"
    " %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor"
    " %}<|im_end|>\n{% endif %}"
)
CHATML_CALLS = (
    '{% for call in m.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}",'
    ' "arguments": {{ call.function.arguments if call.function.arguments is string else'
    " call.function.arguments | tojson }}}</tool_call>{% endfor %}"
)
TOOL_RESULT = "<|im_start|>user\n<tool_response>{{ m.content }}</tool_response><|im_end|>\n"

# Contents other than texts vanish. Turns before the last question lose their reasoning, and the
# last turn has an empty one. Arguments may be objects or texts.
QWEN3 = (
    TOOLS
    + LAST_QUESTION
    + "{% for m in messages %}{% set content = m.content if m.content is string else '' %}"
    "{% if m.role == 'tool' %}" + TOOL_RESULT + "{% elif m.role != 'assistant' %}"
    "<|im_start|>{{ m.role }}\n{{ content }}<|im_end|>\n{% else %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ content }}"
    + CHATML_CALLS
    + "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{%"
    " if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif"
    " %}{% endif %}"
)

# As Qwen3, but the generation prompt opens the reasoning.
QWEN35 = QWEN3.replace(
    "</think>\n\n{% endif %}{% endif %}", "</think>\n\n{% else %}<think>\n{% endif %}{% endif %}"
)

# Contents are added to texts, so that they must be texts. Only a call whose content is null is
# rendered. Arguments are texts. After a tool's result there is no generation prompt.
DEEPSEEK = (
    LAST_QUESTION
    + "{{ bos_token or '' }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{%"
    " elif m.role == 'user' %}{% set ns.is_tool = false %}{{ '<|User|>' + m.content }}{% elif"
    " m.role == 'tool' %}{% if not ns.is_tool %}<|outputs|>{% endif %}{% set ns.is_tool = true"
    " %}{{ '<|output|>' + m.content + '<|/output|>' }}{% elif m.content is none"
    " %}<|Assistant|><|calls|>{% for call in m['tool_calls'] %}{{ '<|call|>' + call['type'] +"
    " '<|sep|>' + call['function']['name'] + '\n' }}{{ call['function']['arguments'] +"
    " '<|/call|>' }}{% endfor %}<|/calls|>{{ eos_token }}{% elif ns.is_tool %}{% set ns.is_tool ="
    " false %}{{ '<|/outputs|>' + m.content + eos_token }}{% else %}{{ '<|Assistant|>' +"
    " m.content + eos_token }}{% endif %}{% endfor %}{% if ns.is_tool %}<|/outputs|>{% elif"
    " add_generation_prompt %}<|Assistant|>{% endif %}"
)

# No token ends a turn: the token that begins the next one does. Arguments are objects. Parts are
# read.
GLM = (
    "{% macro text(content) %}{% if content is string %}{{ content }}{% else %}{% for part in"
    " content %}{{ part.text }}{% endfor %}{% endif %}{% endmacro %}"
    + LAST_QUESTION
    + "[gMASK]<sop>{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}{% for m in messages"
    " %}{% if m.role == 'user' %}<|user|>\n{{ text(m.content) }}{{ '/nothink' if enable_thinking"
    " is defined and not enable_thinking else '' }}{% elif m.role == 'system' %}<|system|>\n{{"
    " text(m.content) }}{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool'"
    " %}<|observation|>{% endif %}\n{{ text(m.content) }}{% else %}<|assistant|>{% if"
    " m.reasoning_content and loop.index0 > ns.last %}\n<think>{{ m.reasoning_content"
    " }}</think>{% else %}\n<think></think>{% endif %}{% if text(m.content) %}{{ '\n' +"
    " text(m.content).strip() }}{% endif %}{% for call in m.tool_calls or [] %}\n<tool_call>{{"
    " call.function.name }}{% for key, value in call.function.arguments.items() %}\n<arg_key>{{"
    " key }}</arg_key><arg_value>{{ value | tojson }}</arg_value>{% endfor %}</tool_call>{%"
    " endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% if"
    " enable_thinking is defined and not enable_thinking %}\n<think></think>{% endif %}{%"
    " endif %}"
)

# Contents become texts whatever they are. Arguments are objects. Each turn has reasoning, perhaps
# an empty one.
NEMOTRON3 = (
    TOOLS
    + LAST_QUESTION
    + "{% for m in messages %}{% if m.role == 'tool' %}"
    + TOOL_RESULT
    + "{% elif m.role != 'assistant' %}<|im_start|>{{ m.role }}\n{{ m.content | string"
    " }}<|im_end|>\n{% else %}<|im_start|>assistant\n{% if m.reasoning_content and loop.index0 >"
    " ns.last %}<think>\n{{ m.reasoning_content }}\n</think>\n{% else %}<think></think>{% endif"
    " %}{{ (m.content | default('', true)) | string | trim }}{% for call in m.tool_calls or []"
    " %}<tool_call><function={{ call.function.name }}>{% for key, value in"
    " call.function.arguments | items %}<parameter={{ key }}>{{ value }}</parameter>{% endfor"
    " %}</function></tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}{% if"
    " add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not"
    " enable_thinking %}<think></think>{% else %}<think>\n{% endif %}{% endif %}"
)

# Contents are lists of parts; a text has none.
PARTS_ONLY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{% if part.type =="
    " 'text' %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}{% if"
    " add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TEMPLATES = {
    "qwen3": QWEN3,
    "qwen3.5": QWEN35,
    "deepseek": DEEPSEEK,
    "glm": GLM,
    "nemotron3": NEMOTRON3,
    "parts only": PARTS_ONLY,
}
ENDS = {"deepseek": "<eos>", "glm": "<|user|>"}
"""The token that ends an answer, if it is not `<|im_end|>`."""
SPECIAL = """
<|im_start|> <|im_end|> <|User|> <|Assistant|> <|calls|> <|/calls|> <|call|> <|/call|> <|sep|>
<|outputs|> <|/outputs|> <|output|> <|/output|> [gMASK] <sop> <|system|> <|user|> <|assistant|>
<|observation|>
""".split()  # noqa: SIM905
"""Special tokens of the templates; `<think>` and `<tool_call>` are tokens, too, but no special
ones."""
TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "\n\n"]
