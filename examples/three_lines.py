"""Three lines let the newest run continue a text; `two_lines.py` makes one."""

from kitforge import pipeline

generate = pipeline("text_generation", model="runs/latest")
print(generate("def "))
