"""Copy the quickstart's tiny model with a chat template that shows tools. python examples/code/make_model.py FOLDER"""

import shutil
import sys
from pathlib import Path

QUICKSTART = Path(__file__).parents[2] / "fuligo" / "quickstart" / "assets" / "model"
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}"
    "{{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }}){{ '\\n' }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    shutil.copytree(QUICKSTART, sys.argv[1], dirs_exist_ok=True)
    Path(sys.argv[1], "chat_template.jinja").write_text(TEMPLATE)


if __name__ == "__main__":
    main()
