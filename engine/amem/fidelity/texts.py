"""Texts that are at hand wherever the engine is."""

from __future__ import annotations

import sysconfig
from pathlib import Path

#: For a first look at a model: prose, a dialogue, figures, names and source code, as agents meet them.
SHORT = """\
The harbour master keeps two books. In the first she writes down every vessel that comes in, its draught, its \
cargo and the hour at which it was made fast; in the second, whatever went wrong. Between 1987 and 2003 the \
second book grew by only forty pages, of which eleven are about the winter when the ice came early and the \
pilot boat Marguerite lost her rudder off the northern mole. "We had no radio that night," her engineer told \
us, "so we counted the lamps on the quay and steered by those." She laughed. "There were nine. I have never \
been so fond of a number."

A report of the port authority gives the figures:

| year | vessels | tonnes | delays |
|------|--------:|-------:|-------:|
| 1987 |   1,204 | 86,310 |     17 |
| 1995 |   1,377 | 91,045 |     12 |
| 2003 |   1,598 | 97,220 |      9 |

User: Which year had the fewest delays for each hundred vessels?
Assistant: 2003, with 9 delays among 1,598 vessels: about 0.56 for each hundred. In 1995 it was 0.87 and in 1987 1.41.

```python
def delays_per_hundred(rows):
    \"\"\"Delays for each hundred vessels, by year.\"\"\"
    return {row["year"]: 100 * row["delays"] / row["vessels"] for row in rows}


best = min(delays_per_hundred(table).items(), key=lambda item: item[1])
print(f"{best[0]}: {best[1]:.2f}")
```

The two books lie side by side on her desk. When the harbour was sold, the new owners asked for the first one only.
"""


def texts_at_hand() -> list[tuple[str, str]]:
    """Prose and source code that come with Python, in turns, the longest first: (name, text).

    Prose is Python's own language reference, as `help()` has it.
    """
    from pydoc_data.topics import topics

    prose = sorted(topics.items(), key=lambda item: (-len(item[1]), item[0]))
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"), key=lambda path: (-path.stat().st_size, path.name))
    code = [(path.name, path.read_text(encoding="utf-8")) for path in files[: len(prose)]]
    named = [(f"help({topic!r})", text) for topic, text in prose]
    return [text for pair in zip(named, code, strict=False) for text in pair]
