"""Makes token ids of prompts and messages. Knows nothing of sampling or answers."""

from array import array
from dataclasses import dataclass
from typing import Any

from cluster.api.images.medium import Medium
from cluster.api.images.opened import OpenedImage
from cluster.api.images.placeholders import PlacedImage, keep_last, place_images, place_videos
from cluster.api.images.reader import ImageReader
from cluster.api.request.messages import take_media
from cluster.api.request.protocol import ChatRequest, CompletionRequest, check_text
from cluster.api.tokenizer import ServingTokenizer
from cluster.api.videos.opened import OpenedVideo
from cluster.errors import BadRequestError

_END_CHARS = 64


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of one sequence, and its echo, which comes before the first token of the answer.

    token_ids   int32, because an array travels between processes as its bytes
    images      and parts of videos, in order; their pixels are not decoded yet

    A chat also has the end of the prompt text, and the message of the assistant that the answer continues, if any.
    """

    token_ids: "array[int]"
    echo: str = ""
    end: str = ""
    unfinished: str | None = None
    images: tuple[PlacedImage, ...] = ()


class PromptEncoder:
    """Tokenises prompts and renders chats.

    keep: number of tokens to keep, from the end of the prompt; None = all.
    images: None if the model takes text alone
    """

    def __init__(self, tokenizer: ServingTokenizer, images: ImageReader | None) -> None:
        self._tokenizer = tokenizer
        self._images = images

    def completion(self, request: CompletionRequest, keep: int | None) -> list[Prompt]:
        """Return the prompts of a completion request, in order."""
        prompts = request.prompts()
        for prompt in prompts:
            if isinstance(prompt, str):
                check_text(prompt, "prompt")
            else:
                self._tokenizer.check_token_ids(prompt, "prompt")
        special = request.add_special_tokens is not False

        return [self._encode(prompt, special, keep, bool(request.echo)) for prompt in prompts]

    def chat(
        self,
        request: ChatRequest,
        keep: int | None,
        tools: list[dict[str, Any]] | None = None,
    ) -> Prompt:
        """Return the prompt of a chat request; `tools` are the definitions of the client. Raises UnreadImages."""
        messages = request.parsed_messages()
        media = take_media(messages)
        opened = self._open(media, request.mm_processor_kwargs) if media else []
        goes_on = bool(request.continue_final_message)
        opens_turn = request.add_generation_prompt
        last = messages[-1]
        if goes_on and last.get("tool_calls"):
            raise BadRequestError(
                "continue_final_message: the final message is complete, because it has tool_calls",
                param="continue_final_message",
            )
        if goes_on and isinstance(last["content"], list):
            raise BadRequestError(
                "continue_final_message: a message with images or videos cannot go on",
                param="continue_final_message",
            )
        echo = last["content"] if request.echo and last["role"] == "assistant" else ""

        text = self._tokenizer.render_chat(
            messages,
            request.template_variables,
            tools=tools,
            documents=request.documents or None,
            add_generation_prompt=not goes_on if opens_turn is None else opens_turn,
            continue_final_message=goes_on,
        )
        check_text(text, "messages")
        text, end = self._with_videos(text, opened), text[-_END_CHARS:]
        # The template writes the special tokens itself.
        ids = self._tokenizer.encode(text, add_special_tokens=bool(request.add_special_tokens))
        unfinished = last["content"] if goes_on else None
        if self._images is None or not opened:
            return Prompt(array("i", _last(ids, keep)), echo, end, unfinished)
        parts = [part for it in opened for part in it.parts]
        whole, images = place_images(ids, self._images.settings.token_ids, parts)
        if keep is not None:
            whole, images = keep_last(whole, images, keep)
        return Prompt(whole, echo, end, unfinished, images)

    @staticmethod
    def _with_videos(text: str, opened: list[OpenedImage | OpenedVideo]) -> str:
        """Return a prompt with the texts of its videos."""
        videos = [it for it in opened if isinstance(it, OpenedVideo)]
        return place_videos(text, videos[0].rules.marker, videos) if videos else text

    def _open(
        self, media: list[Medium], options: dict[str, Any] | None
    ) -> list[OpenedImage | OpenedVideo]:
        if self._images is None:
            raise BadRequestError(
                f"{media[0].kind} 0: this model takes text alone: it has no vision tower, or model.language_model_only "
                "leaves the tower out",
                param="messages",
                code="unsupported_content_part",
            )
        return self._images.open(media, options or {})

    def _encode(
        self, prompt: str | list[int], special: bool, keep: int | None, echo: bool
    ) -> Prompt:
        if isinstance(prompt, list):
            kept = _last(prompt, keep)
            return Prompt(array("i", kept), self._tokenizer.decode(kept) if echo else "")
        ids = self._tokenizer.encode(prompt, add_special_tokens=special)
        kept = _last(ids, keep)
        text = prompt if len(kept) == len(ids) or not echo else self._tokenizer.decode(kept)
        return Prompt(array("i", kept), text if echo else "")


def _last(token_ids: list[int], keep: int | None) -> list[int]:
    return token_ids if keep is None or len(token_ids) <= keep else token_ids[-keep:]
