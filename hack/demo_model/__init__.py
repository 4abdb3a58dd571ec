"""The training data of the demo model.

facts.toml   what the model knows: answers, their sources and questions
questions    expands the questions of facts.toml, and splits them into training and held-out ones
tool_tasks   questions that need a tool, with the calls, results and answers
sampling     draws conversations for training, and lists those of the held-out set
texts        renders conversations with the chat template, and trains the tokenizer
"""
