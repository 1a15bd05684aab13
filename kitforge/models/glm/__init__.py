"""GLM-4 and ChatGLM2/3."""
