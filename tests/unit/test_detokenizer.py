"""Incremental text equals the text of all tokens at once, and stop strings never show."""

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from cluster.api.answer.detokenizer import (
    DecoderFactory,
    StopRules,
    TextStream,
    byte_alphabet,
)
from scripts.byte_tokenizer import byte_tokenizer
from tests.unit.test_stop_strings import reference_cut
from workers.wire.request import RequestOutput

SPACE = "\u2581"


def merged_tokenizer() -> Tokenizer:
    """Byte-level with merges across character borders, and added tokens."""
    stand_in = {byte: char for char, byte in byte_alphabet().items()}
    vocab = {stand_in[byte]: byte for byte in range(256)}
    merges = []
    for pair in (b"he", b"ll", "\u20ac".encode()[:2], b"o "):
        left, right = stand_in[pair[0]], stand_in[pair[1]]
        merges.append((left, right))
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens(
        [AddedToken("<think>"), AddedToken("two words"), AddedToken("\u00e9t\u00e9 \u20ac")]
    )
    return tokenizer


def fallback_tokenizer() -> Tokenizer:
    """The other family: spaces as U+2581, bytes as <0xE2>, first space dropped."""
    words = [SPACE + "the", SPACE + "cat", "s", SPACE, "a", "b"]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


MERGED = merged_tokenizer()
FALLBACK = fallback_tokenizer()
MERGED_FACTORY = DecoderFactory(MERGED)


def pieces(factory, ids, prompt=(), size=1):
    decoder = factory.new(list(prompt))
    out = [decoder.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    return [*out, decoder.flush()]


@given(st.lists(st.integers(0, 263), max_size=60), st.integers(1, 5))
def test_byte_level_equals_decoding_all(ids, size):
    text = "".join(pieces(MERGED_FACTORY, ids, size=size))
    assert text == MERGED.decode(ids, skip_special_tokens=True)


@given(st.text(max_size=40))
def test_no_half_character_is_shown(text):
    ids = MERGED.encode(text).ids
    shown = pieces(MERGED_FACTORY, ids)
    assert shown[-1] == ""  # whole characters leave nothing to flush
    assert "".join(shown) == MERGED.decode(ids, skip_special_tokens=True)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in shown)


def test_character_appears_with_its_last_byte():
    assert pieces(DecoderFactory(byte_tokenizer()), list("\u20ac!".encode())) == [
        "",
        "",
        "\u20ac",
        "!",
        "",
    ]


def test_incomplete_character_is_flushed_once():
    assert pieces(DecoderFactory(byte_tokenizer()), [0x61, 0xE2, 0x82]) == ["a", "", "", "\ufffd"]


def test_long_run_of_invalid_bytes_is_shown_as_it_comes():
    shown = pieces(DecoderFactory(byte_tokenizer()), [0xFF] * 50)
    assert shown == ["\ufffd"] * 50 + [""]


def test_ids_beyond_the_tokenizer_have_no_text():
    assert "".join(pieces(DecoderFactory(byte_tokenizer()), [0x61, 299, 100_000, 0x62])) == "ab"


VALID_FALLBACK_IDS = st.lists(
    st.one_of(
        st.sampled_from(
            [FALLBACK.token_to_id(t) for t in (SPACE + "the", SPACE + "cat", "s", "a")]
        ),
        st.just(FALLBACK.token_to_id("</s>")),
        st.characters(min_codepoint=0x80, exclude_categories=["Cs"]).map(
            lambda char: [byte + 1 for byte in char.encode()]
        ),
    ),
    max_size=30,
).map(lambda items: [i for item in items for i in (item if isinstance(item, list) else [item])])


@given(VALID_FALLBACK_IDS, st.integers(1, 4))
def test_fallback_family_equals_decoding_after_the_prompt(ids, size):
    prompt = FALLBACK.encode(" the cat").ids
    shown = "".join(pieces(DecoderFactory(FALLBACK), ids, prompt, size))
    whole = FALLBACK.decode(prompt + ids, skip_special_tokens=True)
    # U+FFFD as a character of its own is told from a broken one only at the end.
    if "\ufffd" not in whole:
        assert FALLBACK.decode(prompt, skip_special_tokens=True) + shown == whole


def test_fallback_family_keeps_the_first_space_after_a_prompt():
    cat = [FALLBACK.token_to_id(SPACE + "cat")]
    prompt = [FALLBACK.token_to_id(SPACE + "the")]
    assert "".join(pieces(DecoderFactory(FALLBACK), cat, prompt)) == " cat"
    assert "".join(pieces(DecoderFactory(FALLBACK), cat)) == "cat"


@given(st.lists(st.integers(0, 263), max_size=60), st.lists(st.integers(0, 263), max_size=12))
def test_fallback_family_survives_any_ids(ids, prompt):
    shown = pieces(DecoderFactory(FALLBACK), ids, prompt)
    letters = [i for i in ids if FALLBACK.id_to_token(i) in ("a", "b", "s")]
    assert sum(map("".join(shown).count, "abs")) >= len(letters)


def test_fallback_family_does_not_hold_back_invalid_bytes_for_ever():
    shown = pieces(DecoderFactory(FALLBACK), [0xFF + 1] * 100)
    assert "".join(shown) == "\ufffd" * 100
    assert max(map(len, shown)) <= 16


def test_prompt_that_ends_inside_a_character_is_not_repeated():
    prompt = [FALLBACK.token_to_id("a"), 0xE2 + 1, 0x82 + 1]
    assert "".join(pieces(DecoderFactory(FALLBACK), [FALLBACK.token_to_id("b")], prompt)) == "b"


BYTES = DecoderFactory(byte_tokenizer())


def stream_of(stops=(), stop_ids=(), *, skip_special_tokens=True, **rules):
    decoder = BYTES.new([], skip_special_tokens=skip_special_tokens)
    return TextStream(
        decoder, StopRules(strings=list(stops), token_ids=frozenset(stop_ids), **rules)
    )


def out(ids, reason=None):
    return RequestOutput("r", list(ids), reason)


@given(
    st.lists(st.integers(0, 255), min_size=1, max_size=60),
    st.lists(st.text("ab\u20ac\u00e9", min_size=1, max_size=3), max_size=3),
    st.integers(1, 5),
)
def test_stream_equals_the_reference_on_the_full_text(ids, stops, size):
    ids = [b"ab\xe2\x82\xac\xc3\xa9"[i % 7] if i < 250 else i for i in ids]
    full = bytes(ids).decode("utf-8", "replace")
    expected, hit = reference_cut(full, stops)
    stream = stream_of(stops)
    shown = ""
    for start in range(0, len(ids), size):
        last = start + size >= len(ids)
        shown += stream.push(out(ids[start : start + size], "length" if last else None))
        if stream.finish_reason:
            break
    assert shown == expected
    assert stream.finish_reason == ("stop" if hit else "length")
    if hit:  # counts up to the token that completed the stop string
        counted = bytes(ids[: stream.num_tokens]).decode("utf-8", "replace")
        # Without a character that is not complete yet, but with the marks of broken ones.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        before = decoder.decode(bytes(ids[: stream.num_tokens - 1]))
        assert reference_cut(counted, stops)[1] and not reference_cut(before, stops)[1]
    else:
        assert stream.num_tokens == len(ids)


@pytest.mark.parametrize("stops", [[], ["zzz"]])
def test_stop_token_counts_and_has_no_text(stops):
    stream = stream_of(stops, {0x21})
    assert stream.push(out(b"hi")) == "hi"
    assert stream.push(out(b"!", "stop")) == ""
    assert (stream.num_tokens, stream.finish_reason) == (3, "stop")


def test_stop_token_inside_the_text_that_did_not_end_it_is_shown():
    stream = stream_of([], {0x21})
    assert stream.push(out(b"hi!", "length")) == "hi!"


def test_held_back_text_is_shown_when_the_output_ends():
    stream = stream_of(["ab"])
    assert stream.push(out(b"xa")) == "x"
    assert stream.push(out(b"", "length")) == "a"
    assert stream.finish_reason == "length"


def test_stop_string_in_the_last_step_wins_over_length():
    stream = stream_of(["ab"])
    assert stream.push(out(b"xab", "length")) == "x"
    assert stream.finish_reason == "stop"


def test_tokens_after_a_stop_string_are_not_counted():
    stream = stream_of(["b"])
    assert stream.push(out(b"abcdef")) == "a"
    assert (stream.num_tokens, stream.finish_reason) == (2, "stop")


def test_stop_string_completed_by_the_flush():
    stream = stream_of(["\ufffd"])
    assert stream.push(out([0x61, 0xE2], "length")) == "a"
    assert stream.finish_reason == "stop"


def test_stop_reason_names_what_ended_it():
    stream = stream_of(["ab", "b"])
    assert stream.push(out(b"xab")) == "x"
    assert (stream.finish_reason, stream.stop_reason) == ("stop", "ab")
    stream = stream_of([], {0x21, 0x3F}, end_ids=frozenset({0x21}))
    stream.push(out(b"hi?", "stop"))
    assert (stream.finish_reason, stream.stop_reason) == ("stop", 0x3F)
    stream = stream_of([], {0x21, 0x3F}, end_ids=frozenset({0x21}))
    stream.push(out(b"hi!", "stop"))
    assert (stream.finish_reason, stream.stop_reason) == ("stop", None)
    stream = stream_of(["zz"], {0x3F})
    stream.push(out(b"hi?", "length"))
    assert (stream.finish_reason, stream.stop_reason) == ("length", None)


@pytest.mark.parametrize("size", [1, 2, 3, 50])
@pytest.mark.parametrize(
    ("min_tokens", "expected", "counted"),
    [(0, "a", 3), (2, "a", 3), (3, "abcda", 7), (10, "abcdabcda", 11), (11, None, 12)],
)
def test_stop_strings_do_not_count_within_min_tokens(size, min_tokens, expected, counted):
    text = b"abcdabcdabcd"
    stream = stream_of(["bc"], min_tokens=min_tokens)
    shown = ""
    for start in range(0, len(text), size):
        last = start + size >= len(text)
        shown += stream.push(out(text[start : start + size], "length" if last else None))
        if stream.finish_reason:
            break
    assert shown == (text.decode() if expected is None else expected)
    assert stream.finish_reason == ("length" if expected is None else "stop")
    assert stream.num_tokens == counted


def test_stop_string_that_began_within_min_tokens_counts_and_was_held_back():
    stream = stream_of(["bcd"], min_tokens=3)
    assert [stream.push(out([byte])) for byte in b"abcd"] == ["a", "", "", ""]
    assert stream.stop_reason == "bcd"


def test_included_stop_token_has_the_text_it_has():
    assert stream_of([], {0x21}, include=True).push(out(b"hi!", "stop")) == "hi!"
    assert stream_of(["z"], {0x21}, include=True).push(out(b"hi!", "stop")) == "hi!"
    stream = stream_of([], {258}, include=True)
    assert stream.push(out([0x68, 258], "stop")) == "h"  # special tokens are skipped
    stream = stream_of([], {258}, include=True, skip_special_tokens=False)
    assert stream.push(out([0x68, 258], "stop")) == "h<|im_end|>"


def test_special_tokens_can_be_shown():
    for factory, special in ((MERGED_FACTORY, "<|end|>"), (DecoderFactory(FALLBACK), "</s>")):
        tokenizer = MERGED if factory is MERGED_FACTORY else FALLBACK
        ids = [*tokenizer.encode("ab").ids, tokenizer.token_to_id(special)]
        for skip, expected in ((True, "ab"), (False, f"ab{special}")):
            decoder = factory.new([], skip_special_tokens=skip)
            assert decoder.push(ids) + decoder.flush() == expected


def test_bytes_of_single_tokens():
    table = MERGED_FACTORY.token_bytes
    assert table[0xE2] == b"\xe2"
    assert (
        b"".join(table[i] for i in MERGED.encode("he \u20ac\u20ac").ids)
        == "he \u20ac\u20ac".encode()
    )
    assert table[MERGED.token_to_id("<|end|>")] == b"<|end|>"
    assert table[MERGED.token_to_id("\u00e9t\u00e9 \u20ac")] == "\u00e9t\u00e9 \u20ac".encode()
    assert table[9999] == b""


def test_bytes_of_single_tokens_of_the_fallback_family():
    table = DecoderFactory(FALLBACK).token_bytes
    assert table[FALLBACK.token_to_id(SPACE + "cat")] == b" cat"
    assert table[FALLBACK.token_to_id("s")] == b"s"
    assert table[FALLBACK.token_to_id("<0xE2>")] == b"\xe2"
    assert table[FALLBACK.token_to_id("</s>")] == b"</s>"
    assert table[9999] == b""
