"""How many agents fit: cases computed by hand, and what must hold for any model."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amem.errors import InputError
from amem.model.capacity import capacity, capacity_table, format_table, paper_nbytes
from amem.model.geometry import GEOMETRIES, PAPER_GEOMETRIES, geometry
from amem.model.spec import CODECS, LayerKind, LayerSpec, ModelCacheSpec
from amem.sizes import parse_size

MEMORY = parse_size("10.2GiB")

#: One layer of each kind: 2 heads of 64 in full and windowed attention, and a state of 1000 bytes.
SMALL = ModelCacheSpec(
    (
        LayerSpec(0, LayerKind.FULL, 2, 64, 64, 4),
        LayerSpec(1, LayerKind.WINDOW, 2, 64, 64, 4, window=300),
        LayerSpec(2, LayerKind.RECURRENT, state_shapes=((1, 250),), state_nbytes=1000),
    ),
    "float32",
)


def test_a_small_model_by_hand():
    """1000 tokens: 15 groups; the window sees from 701 on, so of blocks 2 and 3, of 144 * 2 bytes a token and layer."""
    found = capacity(SMALL, memory_bytes=10**7, context=1000, codec="q4")
    assert found.full_nbytes == 15 * 64 * 144
    assert found.window_nbytes == 2 * 256 * 144
    assert found.first_nbytes == 4 * 2 * (2 * 128 * 4)
    assert found.state_nbytes == 1000
    assert found.open_nbytes_average == 32 * 2 * (2 * 128 * 4)
    assert found.open_nbytes_most == 64 * 2 * (2 * 128 * 4)
    assert found.agent_nbytes_most == 138240 + 73728 + 8192 + 1000 + 131072
    assert found.agent_nbytes_average == found.agent_nbytes_most - 65536
    assert (found.agents, found.agents_average) == (28, 34)


def test_fp16_and_the_papers_form_keep_no_first_tokens():
    """Plain 16-bit sealed groups; the open group stays in the compute dtype."""
    found = capacity(SMALL, memory_bytes=10**7, context=1000, codec="fp16")
    assert (found.full_nbytes, found.first_nbytes) == (15 * 64 * 512, 0)
    assert found.open_nbytes_most == 64 * 2 * (2 * 128 * 4)
    assert capacity(SMALL, memory_bytes=10**7, context=1000, codec="q4-affine").first_nbytes == 0


@pytest.mark.parametrize(
    ("context", "groups", "blocks"),
    [
        (0, 0, 0),  # nothing yet
        (63, 0, 0),  # all in the open group
        (64, 1, 1),
        (299, 4, 1),  # 256 sealed tokens are one block
        (320, 5, 2),  # a tail of one group has a block's room
        (554, 8, 2),  # position 554 sees from 255 on
        (555, 8, 1),  # block 0 is out of sight
        (1023, 15, 2),
        (1024, 16, 2),
    ],
)
def test_whole_groups_and_touched_blocks(context, groups, blocks):
    """A windowed layer holds blocks that the next token's window touches, as far as groups in them are sealed."""
    found = capacity(SMALL, memory_bytes=1, context=context, codec="q4")
    assert found.full_nbytes == groups * 64 * 144
    assert found.window_nbytes == blocks * 256 * 144
    assert (found.first_nbytes > 0) == (context >= 64)


def test_gemma_at_8k_in_the_papers_memory():
    """The paper holds 3 agents in FP16 and 12 in Q4; charged by window, the same memory holds 12 and 40."""
    spec = geometry("gemma-3-12b")
    q4 = capacity(spec, memory_bytes=MEMORY, context=8192, codec="q4")
    assert q4.full_nbytes == 8 * 8192 * 2304
    assert q4.window_nbytes == 40 * 1024 * 2304
    assert q4.first_nbytes == 4 * 48 * 8 * 512 * 2
    assert q4.open_nbytes_most == 64 * 48 * 8 * 512 * 2
    assert q4.agents == 40
    assert capacity(spec, memory_bytes=MEMORY, context=8192, codec="fp16").agents == 12
    assert MEMORY // paper_nbytes(spec, context=8192, codec="fp16") == 3
    assert MEMORY // paper_nbytes(spec, context=8192, codec="q4") == 12


def test_the_papers_count_of_the_other_models():
    """All layers at full length, 16-bit numbers: 27 * 16 heads of 192 + 128, 32 * 8 of 128 + 128."""
    deepseek, llama = geometry("deepseek-coder-v2-lite"), geometry("llama-3.1-8b")
    assert paper_nbytes(deepseek, context=4096, codec="fp16") == 4096 * 27 * 16 * 320 * 2
    assert paper_nbytes(llama, context=4096, codec="fp16") == 4096 * 32 * 8 * 256 * 2
    assert paper_nbytes(llama, context=4096, codec="q4") == int(4096 * 32 * 8 * 256 * 2 * 0.281)


def test_the_geometries_are_the_models():
    """Gemma: five windowed layers, then a full one."""
    gemma = geometry("gemma-3-12b")
    assert [layer.index for layer in gemma.layers] == list(range(48))
    assert [layer.index for layer in gemma.layers if layer.kind is LayerKind.FULL] == [5, 11, 17, 23, 29, 35, 41, 47]
    assert {layer.window for layer in gemma.layers} == {None, 1024}
    assert [len(geometry(name).layers) for name in PAPER_GEOMETRIES] == [48, 27, 32]
    [smollm] = geometry("smollm2-135m").groups
    assert (len(smollm.layers), smollm.n_kv_heads, smollm.n_q_heads, smollm.k_dim, smollm.v_dim) == (30, 3, 9, 64, 64)


def test_an_unknown_geometry_names_the_nearest():
    """A misspelt name is an input error with a hint."""
    with pytest.raises(InputError, match=r"Did you mean 'llama-3.1-8b'\?"):
        geometry("llama3.1-8B")
    with pytest.raises(InputError, match=r"smollm2-135m\.$"):
        geometry("?")


@pytest.mark.parametrize("wrong", [{"context": -1}, {"memory_bytes": -1}, {"codec": "q5"}])
def test_bad_input_is_refused(wrong):
    """Negative sizes and unknown codecs."""
    with pytest.raises(InputError):
        capacity(SMALL, **({"memory_bytes": 1, "context": 1, "codec": "q4"} | wrong))


def test_the_table_has_a_row_for_each_model_context_and_codec():
    """In the order given, and in plain values for JSON."""
    rows = capacity_table({name: GEOMETRIES[name] for name in PAPER_GEOMETRIES}, memory_bytes=MEMORY)
    assert len(rows) == 3 * 4 * 3
    assert [row.model for row in rows[::12]] == list(PAPER_GEOMETRIES)
    assert [(row.context, row.codec) for row in rows[:4]] == [
        (4096, "q4"),
        (4096, "q4-affine"),
        (4096, "fp16"),
        (8192, "q4"),
    ]
    first = json.loads(json.dumps(rows[3].to_dict()))
    assert (first["model"], first["agents"], first["paper_agents"]) == ("gemma-3-12b", 40, 12)


def test_the_table_as_text():
    """A Markdown table; the count at the open groups' average stands in brackets where it differs."""
    rows = capacity_table({"small": SMALL}, memory_bytes=10**7, contexts=[1000, 1024], codecs=["q4"])
    assert format_table(rows).splitlines() == [
        "| model | context | codec | bytes per agent |  agents | paper's count | agents |",
        "| ----- | ------: | ----- | --------------: | ------: | ------------: | -----: |",
        "| small |    1000 | q4    |          287 kB | 28 (34) |        288 kB |     34 |",
        "| small |      1K | q4    |          296 kB | 27 (33) |        295 kB |     33 |",
    ]


# -- for any model -----------------------------------------------------------------------------------------------------

_specs = st.sampled_from([SMALL, *GEOMETRIES.values()])
_codecs = st.sampled_from(CODECS)


@given(_specs, st.integers(0, 10**12), st.integers(0, 200_000), _codecs)
def test_as_many_agents_as_fit_and_not_one_more(spec, memory, context, codec):
    """``agents`` at their largest fit, one more does not; at their average at least as many."""
    found = capacity(spec, memory_bytes=memory, context=context, codec=codec)
    assert found.agents * found.agent_nbytes_most <= memory < (found.agents + 1) * found.agent_nbytes_most
    assert found.agents_average >= found.agents
    data = json.loads(json.dumps(found.to_dict()))
    assert data["agents"] == found.agents
    assert data["agent_nbytes_most"] == found.agent_nbytes_most


@given(st.integers(65, 3000), st.integers(0, 10_000), _codecs)
def test_windows_hold_exactly_the_blocks_of_the_tokens_they_see(window, context, codec):
    """Counted token by token; a window of 64 or less may see nothing of the last block, which is held all the same."""
    spec = ModelCacheSpec((LayerSpec(0, LayerKind.WINDOW, 1, 64, 64, 1, window),), "float16")
    sealed = context // 64 * 64
    blocks = {position // 256 for position in range(max(0, context - window + 1), sealed)}
    found = capacity(spec, memory_bytes=1, context=context, codec=codec)
    assert found.window_nbytes == len(blocks) * spec.block_nbytes(codec)[LayerKind.WINDOW]


@given(_specs, st.integers(0, 100_000), st.integers(0, 100_000), _codecs)
def test_a_longer_context_never_takes_less_in_full_layers(spec, one, other, codec):
    """And a window never more than all its layers' tokens."""
    short, long = (capacity(spec, memory_bytes=1, context=context, codec=codec) for context in sorted((one, other)))
    assert short.full_nbytes <= long.full_nbytes
    everything = spec.token_nbytes(codec).get(LayerKind.WINDOW, 0) * (long.context + 255)
    assert long.window_nbytes <= everything


@given(_specs, st.integers(0, 100_000))
def test_quantized_agents_are_smaller(spec, context):
    """Sealed bytes: q4 and the paper's form take at most 0.29 of FP16 where head dims are whole groups of 64."""
    sealed = {codec: capacity(spec, memory_bytes=1, context=context, codec=codec) for codec in CODECS}
    kv = {codec: found.full_nbytes + found.window_nbytes for codec, found in sealed.items()}
    assert kv["q4"] == kv["q4-affine"]
    assert kv["q4"] * 32 == kv["fp16"] * 9
