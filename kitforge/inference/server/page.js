"use strict";
const [talk, form, text, token, send, stop] = ["talk", "form", "text", "token", "send", "stop"]
  .map((name) => document.getElementById(name));
let messages = [], running = null;

function show(kind, words) {
  const paragraph = document.createElement("p");
  paragraph.className = kind;
  // Text only: whatever a model writes is never read as HTML.
  paragraph.textContent = words;
  talk.append(paragraph);
  paragraph.scrollIntoView({ block: "end" });
  return paragraph;
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.slice("data: ".length);
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function answer(paragraph, signal) {
  const headers = { "Content-Type": "application/json" };
  if (token.value) headers.Authorization = `Bearer ${token.value}`;
  const body = JSON.stringify({ messages, stream: true });
  const response = await fetch("/v1/chat/completions", { method: "POST", headers, body, signal });
  if (!response.ok) throw new Error((await response.json()).error.message);
  for await (const event of events(response.body)) {
    if (event.error) throw new Error(event.error.message);
    for (const { delta } of event.choices) {
      paragraph.textContent += (delta.reasoning || "") + (delta.content || "");
      // A thought is shown, and is no part of what is sent back.
      paragraph.reply = (paragraph.reply || "") + (delta.content || "");
    }
    talk.scrollTop = talk.scrollHeight;
  }
}

async function ask(words) {
  const asked = { role: "user", content: words }, own = show("user", words), paragraph = show("assistant", "");
  const here = running = new AbortController();
  messages.push(asked);
  [send.hidden, stop.hidden] = [true, false];
  try {
    await answer(paragraph, here.signal);
  } catch (error) {
    if (error.name !== "AbortError") {
      // What was not answered can be said again; the conversation goes on without it.
      show("problem", error.message);
      if (!paragraph.textContent) {
        messages = messages.filter((message) => message !== asked);
        paragraph.remove();
        own.remove();
        text.value = words;
      }
    }
  }
  if (messages.includes(asked)) messages.push({ role: "assistant", content: paragraph.reply || "" });
  if (running !== here) return;
  running = null;
  [send.hidden, stop.hidden] = [false, true];
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const words = text.value.trim();
  if (!words || running) return;
  text.value = "";
  ask(words);
});
text.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
});
stop.addEventListener("click", () => running?.abort());
document.getElementById("new").addEventListener("click", () => {
  running?.abort();
  messages = [];
  talk.replaceChildren();
  text.focus();
});
