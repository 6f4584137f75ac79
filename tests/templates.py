"""Chat templates in the manner of well-known families, cut down to what matters in tests.

The tiny tokenizer's end of turn is <|im_end|> (2); its other special tokens are <|endoftext|> (0) and <|im_start|> (1).
"""

from __future__ import annotations

from tests.tiny import CHATML

WITH_DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}" + CHATML
)
BOS_AND_TRIM = (  # Llama 3
    "{{ '<|endoftext|>' }}{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n\n' + m['content'] | trim + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
NO_SYSTEM = (  # Gemma 2
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + ('model' if m['role'] == 'assistant' else 'user') + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"
)
SYSTEM_IGNORED = (
    "{% for m in messages if m['role'] != 'system' %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + "
    "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SYSTEM_IN_USER = (  # Llama 2 and early Mistral: no header tokens, a space before the end of turn, BOS in every turn
    "{% for m in messages %}"
    "{% if m['role'] == 'system' %}{% set ns = namespace(text=m['content']) %}"
    "{% elif m['role'] == 'user' %}{{ '<|endoftext|>[INST] ' + (messages[0]['content'] + '\n\n' "
    "if messages[0]['role'] == 'system' and loop.index0 == 1 else '') + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' <|im_end|>' }}{% endif %}{% endfor %}"
)
THINKING = (  # Qwen3: earlier replies lose what was thought, and an empty thought may be put in
    "{% for m in messages %}{% set text = m['content'].split('</think>')[-1].lstrip('\n') %}"
    "{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
TWO_ENDS = (  # gpt-oss: the last reply ends with a token of its own, earlier ones with another
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '<|msg|>' + m['content'] }}"
    "{{ '<|im_end|>' if m['role'] == 'assistant' and loop.last else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)
NO_REPLIES = (
    "{{ '<|endoftext|>' }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ 'Q: ' + m['content'] + '\nA:' }}{% endif %}{% endfor %}"
)
REFUSES_REPLIES = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ raise_exception('one question only') }}{% endif %}"
    "{{ m['content'] }}{% endfor %}"
)
TOOLS = (  # Qwen3: tools in the system text, a tool's answer in a user's message, earlier replies without their thought
    "{% set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}"
    "{% if tools or system %}{{ '<|im_start|>system\n' + system }}"
    "{% for tool in tools or [] %}{{ '\n' + tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages if m['role'] != 'system' %}"
    "{% if m['role'] == 'tool' %}"
    "{% if loop.previtem is not defined or loop.previtem['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m['content'] + '\n</tool_response>' }}"
    "{% if loop.nextitem is not defined or loop.nextitem['role'] != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'].split('</think>')[-1].lstrip('\n') }}"
    "{% for call in m['tool_calls'] or [] %}{% set tool_call = call['function'] %}"
    '{{ \'\n<tool_call>\n{"name": "\' + tool_call.name + \'", "arguments": \' }}'
    "{{ tool_call.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NUMBERED = (  # each message says which one it is, so that it depends on all before it
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' + loop.index | string + '\n' + m['content'] + "
    "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant ' + (messages | length + 1) | string + '\n' }}{% endif %}"
)
DATED = (  # Llama 3.1: the template writes the day
    "{{ '<|im_start|>system\nToday: ' + strftime_now('%d %b %Y %H:%M:%S.%f') + '<|im_end|>\n' }}" + CHATML
)
