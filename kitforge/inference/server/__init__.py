"""An engine over HTTP, in the words of OpenAI's interface."""
