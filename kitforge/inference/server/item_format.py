"""Responses of /v1/responses: what a reply says, as items, and the events that tell of them. Independent of HTTP."""

import secrets
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

from kitforge.data.chat.tool_calls import ReplyPart
from kitforge.inference.server.errors import ApiError
from kitforge.inference.server.responses import Choice, ChoiceReader, ResponseOptions, sse_event
from kitforge.inference.server.service import RequestHandle
from kitforge.inference.text_engine import TextDelta

# Of the parts of a reply that are text: how ids of their items begin, the item, its content, and the name in events.
_TEXTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "content": ("msg", {"type": "message", "role": "assistant"}, {"annotations": [], "logprobs": []}),
    "reasoning": ("rs", {"type": "reasoning", "summary": []}, {}),
}
_NAMES = {"content": "output_text", "reasoning": "reasoning_text", "arguments": "function_call_arguments"}


class ItemWriter:
    """Writes the parts of a reply as items, one after another, and each step as an event. All events of a response are
    numbered in a row."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._events: list[dict[str, Any]] = []
        self._num_events = 0
        self._kind = ""  # of the part that the last item is of; none once that is whole
        self._texts: list[str] = []  # of that item

    def tell(self, event: str, fields: Mapping[str, Any]) -> None:
        """Add an event."""
        self._events.append({"type": f"response.{event}", "sequence_number": self._num_events, **fields})
        self._num_events += 1

    def take_events(self) -> list[dict[str, Any]]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def write(self, part: ReplyPart) -> None:
        """Go on with the last item, or begin one with a part of another kind and with a call."""
        if part.kind == "call" or part.kind != self._kind:
            self.close("completed")
            self._begin(part)
        if part.kind != "call":
            self._texts.append(part.text)
            self._tell_text("delta", {"delta": part.text})

    def close(self, status: str) -> None:
        """End the last item."""
        if not self._kind:
            return
        text, item = "".join(self._texts), self.items[-1] | {"status": status}
        if self._kind == "arguments":
            item["arguments"] = text
            self._tell_text("done", {"arguments": text})
        else:
            content = {"type": _NAMES[self._kind], "text": text, **_TEXTS[self._kind][2]}
            item["content"] = [content]
            self._tell_text("done", {"text": text})
            self.tell("content_part.done", self._position() | {"part": content})
        self.tell("output_item.done", {"output_index": len(self.items) - 1, "item": item})
        self.items[-1], self._kind, self._texts = item, "", []

    def _begin(self, part: ReplyPart) -> None:
        """Begin the item of a part: a call, or the first text of a message or thought."""
        self._kind = "arguments" if part.kind == "call" else part.kind
        if part.kind == "call":
            prefix, item = "fc", {"type": "function_call", "call_id": part.id, "name": part.text, "arguments": ""}
        else:
            prefix, named, further = _TEXTS[part.kind]
            item = named | {"content": []}
        self.items.append({"id": f"{prefix}_{secrets.token_hex(12)}", "status": "in_progress", **item})
        self.tell("output_item.added", {"output_index": len(self.items) - 1, "item": self.items[-1]})
        if part.kind != "call":
            content = {"type": _NAMES[part.kind], "text": "", **further}
            self.tell("content_part.added", self._position() | {"part": content})

    def _tell_text(self, event: str, text: dict[str, Any]) -> None:
        further: dict[str, Any] = {"logprobs": []} if self._kind == "content" else {}
        self.tell(f"{_NAMES[self._kind]}.{event}", self._position() | text | further)

    def _position(self) -> dict[str, Any]:
        position = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return position if self._kind == "arguments" else position | {"content_index": 0}


class ItemFormat:
    """A response, `echoed` what it repeats of its request. The whole one is what the events of a stream end with."""

    options = ResponseOptions()

    def __init__(self, model: str, echoed: Mapping[str, Any]) -> None:
        self._head = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            "previous_response_id": None,
            "usage": None,
            **echoed,
        }
        self._writer = ItemWriter()
        self._num_thought = 0  # tokens up to the first that is behind a thought

    def response_body(self, handle: RequestHandle, deltas: Sequence[Iterable[TextDelta]]) -> dict[str, Any]:
        """The response body, from the deltas of the one choice."""
        reader = ChoiceReader(handle.prompts[0], self.options)
        for delta in deltas[0]:
            choice = reader.read(delta, None)
            self._write(choice, len(delta.tokens))
        return self._end(choice, handle)

    async def events(self, handle: RequestHandle, *, has_usage: bool, is_continuous: bool) -> AsyncIterator[bytes]:
        """The response as server-sent events, of which the last alone has the usage, whatever is asked."""
        reader, writer = ChoiceReader(handle.prompts[0], self.options), self._writer
        begun = self._body("in_progress")
        writer.tell("created", {"response": begun})
        writer.tell("in_progress", {"response": begun})
        try:
            async for _, delta in handle.deltas():
                choice = reader.read(delta, None)
                self._write(choice, len(delta.tokens))
                if choice.finish_reason is not None:
                    ended = self._end(choice, handle)
                    writer.tell(ended["status"], {"response": ended})
                for event in writer.take_events():
                    yield _named(event)
        except ApiError as refusal:
            error = {"code": "server_error", "message": str(refusal)}
            writer.tell("failed", {"response": self._body("failed") | {"error": error}})
            for event in writer.take_events():
                yield _named(event)

    def _write(self, choice: Choice, num_tokens: int) -> None:
        for part in choice.parts:
            self._writer.write(part)
        # A thought comes first.
        self._num_thought += num_tokens if [each["type"] for each in self._writer.items] == ["reasoning"] else 0

    def _end(self, choice: Choice, handle: RequestHandle) -> dict[str, Any]:
        """The whole response. A reply that says nothing is a message without text, which clients look for."""
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        self._writer.close(status)
        if status == "completed" and all(each["type"] == "reasoning" for each in self._writer.items):
            self._writer.write(ReplyPart(kind="content", text=""))
            self._writer.close(status)
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        usage = handle.usage()
        counts = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._num_thought},
            "total_tokens": usage["total_tokens"],
        }
        return self._body(status) | {"incomplete_details": cut, "usage": counts}

    def _body(self, status: str) -> dict[str, Any]:
        return self._head | {"status": status, "output": [*self._writer.items]}


def _named(event: Mapping[str, Any]) -> bytes:
    return f"event: {event['type']}\n".encode() + sse_event(event)
