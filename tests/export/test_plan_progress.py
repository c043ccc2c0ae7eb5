"""What is shown while TensorRT builds: a moving line on a terminal, few lines in a log."""

from export.plan_progress import LINE_STEPS, WIDTH, Ticker


def test_a_terminal_has_one_line_that_moves_and_leaves_nothing_behind() -> None:
    ticker = Ticker(is_terminal=True)
    assert ticker.say("first") == "first\n"
    shown = ticker.update("depth", "Timing tactics", 1, 3)
    assert shown.startswith("\r  depth")
    assert "Timing tactics, 1 of 3" in shown
    assert len(shown) == WIDTH + 1
    assert len(ticker.update("depth", "x" * 200, 1, 3)) == WIDTH + 1
    cleared = ticker.say("built")
    assert cleared == f"\r{' ' * WIDTH}\rbuilt\n"
    assert ticker.say("again") == "again\n"


def test_a_log_has_a_line_now_and_then() -> None:
    ticker = Ticker(is_terminal=False)
    lines = [ticker.update("depth", "Timing", step, 9) for step in range(3 * LINE_STEPS)]
    assert sum(map(bool, lines)) == 3
    assert "\r" not in "".join(lines)
