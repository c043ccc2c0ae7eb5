"""What an operator can get wrong: the one kind of exception `export` prints as a sentence.

Whatever a caller of `duplexbox export` can cause (a folder that holds no checkpoint, a flag that
cannot be, a full disk) is a `Mistake`, and its message says what happened and which command or
step comes next. Everything else is a defect of ours and keeps its traceback.
"""


class Mistake(ValueError):
    """The operator's to solve; one sentence, with a way out."""
