"""The pytest plug-in, as a user's project has it: API-BY-EXAMPLE 15 and what can go wrong."""

from __future__ import annotations

import sys

import pytest

TASKS = """
    from machinery_py import NoRetry, Server

    server = Server("redis://no-such-host:1/0") if False else Server("sqlite:////nowhere/at/all.db")


    @server.task
    def add(a: int, b: int, *more: int) -> int:
        return a + b + sum(more)


    @server.task
    def send_welcome(email: str, *, lang: str = "en") -> None: ...


    @server.task(retries=3)
    def download(url: str) -> None:
        if not url.startswith("https:"):
            raise NoRetry(f"not a web address: {url}")
"""

# Word for word the listing of the section, but for where the tasks come from.
LISTING = """
    import pytest

    from machinery_py import TaskFailed, Worker
    from machinery_py.testing import Harness
    from shop.tasks import add, download, send_welcome


    def signup(email: str) -> None:                      # the code under test
        send_welcome.send(email)
        add.options(delay=3600).send(1, 2)


    def test_signup_sends_a_mail_now_and_adds_later(machinery: Harness) -> None:
        signup("ada@example.com")                        # nothing runs by itself

        machinery.assert_sent("send_welcome", "ada@example.com")
        assert machinery.drain() == 1                    # runs what is due, here, in this thread

        machinery.advance(hours=1)                       # moves the clock, waits for nothing
        assert machinery.drain() == 1


    def test_a_failure_comes_out(machinery: Harness) -> None:
        download.send("ftp://x")

        with pytest.raises(TaskFailed, match="not a web address"):
            machinery.drain()


    def test_with_a_real_worker(machinery_worker: Worker) -> None:      # threads, memory broker
        assert add.send(1, 2).get(timeout=5) == 3


    def test_the_function_alone() -> None:
        assert add(1, 2) == 3
"""


def project(
    pytester: pytest.Pytester, *, tests: str, tasks: str = TASKS, app: str = "shop.tasks:server"
) -> None:
    option = f"machinery_app = {app}" if app else ""
    pytester.makefile(".cfg", setup=f"[tool:pytest]\n{option}\n")
    pytester.makepyfile(**{"shop/__init__": "", "shop/tasks": tasks, "tests/test_shop": tests})


def run(pytester: pytest.Pytester, *args: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *args, timeout=60)


def test_the_listing_of_the_manual_passes(pytester: pytest.Pytester) -> None:
    project(pytester, tests=LISTING)
    run(pytester).assert_outcomes(passed=4)


def test_a_module_with_one_server_needs_no_name(pytester: pytest.Pytester) -> None:
    project(pytester, tests=LISTING, app="shop.tasks")
    run(pytester).assert_outcomes(passed=4)


ONE = """
    def test_it(machinery):
        assert machinery.drain() == 0
"""


@pytest.mark.parametrize(
    ("app", "text"),
    [
        ("", "*no machinery_app: which Server is to be tested?*machinery_app = shop.tasks:server*"),
        (
            "shop.task",
            "*machinery_app = shop.task, *: cannot import 'shop.task' *: "
            "no such module (there is 'shop.tasks'*",
        ),
        ("shop.tasks:app", "*module 'shop.tasks': no 'app' in it (there is 'server')*"),
        ("shop.tasks:add", "*module 'shop.tasks': 'add' is a Task (expected a Server)*"),
        ("shop", "*module 'shop': no Server found*"),
        (":server", "*no module named (expected MODULE or MODULE:OBJECT)*"),
    ],
)
def test_an_app_that_cannot_be_found_is_told_in_words(
    pytester: pytest.Pytester, app: str, text: str
) -> None:
    project(pytester, tests=ONE, app=app)
    result = run(pytester)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([text])


def test_two_servers_are_told_apart(pytester: pytest.Pytester) -> None:
    tasks = "from machinery_py import Server\nserver = Server('memory://')\nbatch = Server('memory://')\n"
    project(pytester, tests=ONE, tasks=tasks, app="shop.tasks")
    result = run(pytester)
    text = "*module 'shop.tasks': 2 Servers, 'server' and 'batch' (pick one: *shop.tasks:server)*"
    result.stdout.fnmatch_lines([text])


def test_import_error_inside_the_module_is_shown_whole(pytester: pytest.Pytester) -> None:
    project(pytester, tests=ONE, tasks="import no_such_library\n")
    result = run(pytester)
    result.stdout.fnmatch_lines(["*ModuleNotFoundError: No module named 'no_such_library'*"])


def test_both_fixtures_in_one_test_are_refused(pytester: pytest.Pytester) -> None:
    project(pytester, tests="def test_it(machinery, machinery_worker): ...\n")
    result = run(pytester)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*takes both 'machinery' and 'machinery_worker'*"])


def test_crash_points_of_a_task(pytester: pytest.Pytester) -> None:
    project(
        pytester,
        tests="""
        from machinery_py.testing import CrashPoints
        from shop.tasks import add

        def test_it(crash_points: CrashPoints):
            report = crash_points.run(add, 1, 2)
            assert report.points and not report.lost and not report.doubled

        def test_both(crash_points, machinery): ...
    """,
    )
    result = run(pytester)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*takes both 'machinery' and 'crash_points'*"])


def test_a_conftest_may_say_which_server(pytester: pytest.Pytester) -> None:
    project(pytester, tests=LISTING, app="")
    pytester.makeconftest("""
        import pytest

        @pytest.fixture
        def machinery_server():
            from shop.tasks import server
            return server
    """)
    run(pytester).assert_outcomes(passed=4)


def test_the_server_is_put_back_after_a_test_that_failed(pytester: pytest.Pytester) -> None:
    project(
        pytester,
        tests="""
        from shop.tasks import add, server

        def test_breaks(machinery):
            add.send(1, 2)
            assert server.config.broker.startswith("memory:")
            raise RuntimeError

        def test_breaks_with_a_worker(machinery_worker):
            raise RuntimeError

        def test_after(request):
            assert server.config.broker == "sqlite:////nowhere/at/all.db"
            assert server.app._stores is None
    """,
    )
    run(pytester).assert_outcomes(passed=1, failed=2)


def test_plugin_loads_nothing_heavy_before_a_fixture_is_used(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        test_nothing="""
        import sys

        def test_nothing():
            assert "machinery_py.testing.plugin" in sys.modules
            heavy = {"machinery_py.testing.harness", "machinery_py.testing.conformance",
                     "redis", "pymongo", "pika",
                     "sqlite3", "hypothesis"}
            assert not heavy & set(sys.modules)
    """
    )
    run(pytester, "-p", "no:hypothesispytest", "-p", "no:randomly").assert_outcomes(passed=1)


def test_the_library_itself_does_not_import_pytest(pytester: pytest.Pytester) -> None:
    result = pytester.run(
        sys.executable,
        "-c",
        (
            "import sys, machinery_py.testing.harness, "
            "machinery_py.testing.waiting, machinery_py.testing.flaky; "
            "sys.exit('pytest' in sys.modules)"
        ),
    )
    assert result.ret == 0
