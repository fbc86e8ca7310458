"""The text of a row while it is written: nothing is sent that a stop string or a character could still change."""

import pytest

from jmarl.serving.text import LENGTH, STOP, RowText, joined


@pytest.fixture
def pieces(tiny_tokenizer):
    """A function that gives a text token by token to a `RowText`, and returns its pieces."""

    def write(text, step=1, ended=True, **settings):
        row, result = RowText(tiny_tokenizer, **settings), []
        ids = tiny_tokenizer.encode(text, add_special_tokens=False) + [tiny_tokenizer.eos_token_id] * ended
        for i in range(0, len(ids), step):
            last = i + step >= len(ids)
            result.append(
                row.add(ids[i : i + step], [float(-j) for j in range(i, min(i + step, len(ids)))], ended and last, last)
            )
            if row.finish:
                break
        return result

    return write


@pytest.mark.parametrize("step", [1, 3, 100])
def test_pieces_are_the_whole_text(pieces, tiny_tokenizer, step):
    text = "The farmer äöü 日本 went 🙂 to the market."
    whole = joined(written := pieces(text, step))
    assert whole.text == text and whole.finish == STOP and not any("\ufffd" in piece.text for piece in written)
    assert whole.ids == [*tiny_tokenizer.encode(text, add_special_tokens=False), tiny_tokenizer.eos_token_id]
    assert whole.logprobs == [float(-j) for j in range(len(whole.ids))]
    assert joined(pieces(text, step, ended=False)).finish == LENGTH


@pytest.mark.parametrize("step", [1, 2, 7, 100])
@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (["market"], "one two mark, then the "),
        (["mark"], "one two "),
        (["two mark,", "mark"], "one two "),  # the one that is complete first
        (["o mark", "wo mar"], "one t"),  # complete at the same token or not, whatever the step
        (["nowhere", "ket!"], "one two mark, then the market."),
        (["market."], "one two mark, then the "),
    ],
)
def test_a_stop_string_cuts_the_text_wherever_tokens_end(pieces, step, stops, expected):
    alone = joined(pieces("one two mark, then the market.", 1, stops=stops))
    whole = joined(pieces("one two mark, then the market.", step, stops=stops))
    assert whole == alone and whole.text == expected and whole.finish == STOP


def test_what_could_be_the_beginning_of_a_stop_string_is_not_sent(pieces):
    sent = ""
    for piece in pieces("ab abc abcd", stops=["abcd"]):
        sent += piece.text
        assert not sent.endswith(("a", "ab", "abc")) or piece.finish
    assert sent == "ab abc "


def test_text_with_tools_is_sent_whole(pieces):
    *first, last = pieces("one two three", whole=True)
    assert {piece.text for piece in first} == {""} and last.text == "one two three"
