from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from machinery_py.config.server_urls import (
    AMQP_OPTIONS,
    REDIS_OPTIONS,
    UrlOption,
    parse_amqp_url,
    parse_memcache_url,
    parse_redis_url,
)
from machinery_py.config.urls import (
    EMBEDDED,
    SCHEMES,
    SQLITE_OPTIONS,
    Role,
    StoreUrl,
    check_url,
    redact,
    scheme_of,
    serves,
    split_urls,
    without_secrets,
)
from machinery_py.errors import ConfigError

ROLES: tuple[Role, ...] = get_args(Role)


# redact


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://secret@host:6379/0", "redis://***@host:6379/0"),
        ("redis://:secret@host", "redis://***@host"),
        ("redis://user:secret@host", "redis://***@host"),
        ("redis://:p@ss/w:o%r#d@host:6379/0", "redis://***@host:6379/0"),
        ("redis://:secret@h1:7000,h2:7001,h3/0", "redis://***@h1:7000,h2:7001,h3/0"),
        ("redis://[::1]:6379/0", "redis://[::1]:6379/0"),
        ("redis+socket://secret@/run/redis.sock:/0", "redis+socket://***@/run/redis.sock:/0"),
        ("amqp://guest:secret@localhost:5672/", "amqp://guest:***@localhost:5672/"),
        ("amqp://secret@localhost", "amqp://***@localhost"),
        ("amqp://u:secret@h1;amqp://u:secret@h2", "amqp://u:***@h2"),
        (
            "mongodb://u:secret@h1,h2/db?replicaSet=rs0&tls=true",
            "mongodb://u:***@h1,h2/db?replicaSet=rs0&tls=true",
        ),
        (
            "mongodb://h/db?replicaSet=rs0&password=secret&w=1",
            "mongodb://h/db?replicaSet=rs0&password=***",
        ),
        ("redis://h/0?PASSWORD=secret", "redis://h/0?PASSWORD=***"),
        ("redis://h/0?ssl=true;redis://h2?password=secret", "redis://h/0?ssl=***"),
        ("redis://h/0?secret", "redis://h/0?***"),
        ("redis://h/0?password=sec@ret", "redis://***"),
        ("redis://h#secret", "redis://h#***"),
        ("redis://user:secret/0", "redis://***"),
        ("amqp://h/v;amqp://user:secret", "amqp://h/***"),
        ("redis://secret%40host", "redis://***"),
        ("user:secret@host/db", "***"),
        ("redis:/user:secret", "***"),
        ("localhost:6379", "***"),
        ("redis", "redis"),
        ("redis://host/secret", "redis://host/***"),
        ("amqp://h//", "amqp://h//"),
        ("toy://user:secret@h/x", "toy://***@h/x"),
        ("sqlite:///u:secret@h/x.db", "sqlite:///***@h/x.db"),
        ("sqlite:///u:sec?ret@h/x.db", "sqlite://***"),
        ("a secret://host", "***"),
        (
            "sqlite:////home/ada@home/a#1.db?synchronous=full",
            "sqlite:////home/ada@home/a#1.db?synchronous=full",
        ),
        ("sqlite:///a.db?key=secret", "sqlite:///a.db?key=***"),
        ("sqlite://:memory:", "sqlite://:memory:"),
        ("eager", "eager"),
        ("", ""),
    ],
)
def test_a_url_is_shown_without_its_secrets(url: str, shown: str) -> None:
    assert redact(url) == shown


def test_only_secrets_are_masked_in_an_encoded_url() -> None:
    assert (
        redact("amqp://ada:s%40cret%2F@mq.example.com:5672/shop")
        == "amqp://ada:***@mq.example.com:5672/shop"
    )


# Words that stand nowhere else in the URLs, joined by what breaks parsers; none may be shown.
WORDS = ("KILO", "LIMA", "MIKE")
PASSWORDS = st.lists(
    st.sampled_from(
        [
            *WORDS,
            "@",
            "/",
            ":",
            "%",
            "#",
            "?",
            "&",
            "=",
            ",",
            ";",
            "%40",
            "//",
            "://",
            " ",
            "é",
            "[",
            "]",
        ]
    ),
    min_size=1,
    max_size=8,
).map("".join)
SHAPES = (
    "redis://{}@host:6379/0",
    "redis://:{}@host",
    "redis://user:{}@host/0?ssl=true",
    "rediss://:{}@h1:1,h2:2,h3:3/0",
    "redis+socket://{}@/run/redis.sock:/1",
    "amqp://guest:{}@localhost:5672/",
    "mongodb://u:{}@h1,h2/db?replicaSet=rs0",
    "sqlite://u:{}@h/x.db",
    "redis://host/0?password={}",
    "redis://host/0?ssl=true&password={}&w=1",
    "sqlite:///x.db?key={}",
    "reddis://user:{}@host",
    "toy://user:{}@host/x?y={}",
    "sqlite:///user:{}@host/x.db",
    "redis://u:{}@h1,u:{}@h2/0?ssl=true",
    "amqp://u:{}@h1;amqp://u:{}@h2",
    "mongodb://h/db?authMechanismProperties=AWS_SESSION_TOKEN:{}",
    "mongodb://u:{}@h:1/db?tlsCertificateKeyFilePassword={}",
    "redis://h/0?sentinel_password={}",
    "redis://host/{}",
    # malformed
    "user:{}@host",
    "user:{}",
    "//user:{}@host",
    "redis:/user:{}@host",
    "redis:/user:{}",
    "redis//user:{}@host",
    "redis:user:{}@host",
    "redis:///user:{}",
    "amqp:///user:{}",
    "redis://user:{}",
    "redis:://user:{}@host",
    "redis://redis://user:{}@host",
    '"redis://user:{}@host"',
    "MACHINERY_URL=redis://user:{}@host",
)


def filled(shape: str, password: str) -> str:
    """Return the URL. A shape without a host gets a password without '@', or it would have one."""
    if shape.endswith("{}") and "://" in shape and ":///" not in shape and "?" not in shape:
        password = password.replace("@", "")
    return shape.replace("{}", password)


@given(shape=st.sampled_from(SHAPES), password=PASSWORDS)
@example(shape="redis:///user:{}", password="@KILO")
def test_no_part_of_a_password_is_ever_shown(shape: str, password: str) -> None:
    shown = redact(filled(shape, password))

    assert not any(word in shown for word in WORDS), shown


@given(password=PASSWORDS.filter(lambda one: "://" not in one))
def test_password_in_place_of_a_url_is_masked(password: str) -> None:
    """With `://` in it, it reads as the URL of somebody else's store, which is shown."""
    shown = redact(password)

    assert not any(word in shown for word in WORDS), shown


@given(shape=st.sampled_from(SHAPES), password=PASSWORDS, role=st.sampled_from(ROLES))
def test_no_error_text_of_a_url_shows_its_password(shape: str, password: str, role: Role) -> None:
    try:
        check_url(filled(shape, password), role)
    except ConfigError as error:
        assert not any(word in str(error) for word in WORDS), error


@pytest.mark.parametrize(
    "url",
    ["redis://user:KI%4CO@h", "redis://KILO@h", "redis://h?master_name=m&sentinel_password=KILO"],
)
def test_url_in_a_servers_error_is_masked(url: str) -> None:
    said = "ERR unknown command 'AUTH', with args beginning with: 'user' 'KILO'"

    assert without_secrets(said, url) == said.replace("KILO", "***")
    assert without_secrets(said, "redis://h/0", "amqp://user:x@h") == said


@given(
    st.one_of(
        st.text(),
        st.tuples(st.sampled_from(SHAPES), PASSWORDS).map(lambda two: two[0].replace("{}", two[1])),
    )
)
def test_masking_a_masked_url_changes_nothing(url: str) -> None:
    assert redact(redact(url)) == redact(url)


# scheme_of, split_urls, serves


@pytest.mark.parametrize(
    ("url", "scheme"),
    [
        ("sqlite:///a.db", "sqlite"),
        ("Redis+Socket:///a.sock", "redis+socket"),
        ("mongodb+srv://h", "mongodb+srv"),
        ("PostgreSQL://h/d", "postgresql"),
        ("eager", "eager"),
        ("null", "null"),
        ("memory", ""),
        ("localhost:6379", ""),
        ("a b://c", ""),
        ("://c", ""),
        ("", ""),
    ],
)
def test_the_scheme_of_a_url_is_in_lower_case_or_empty(url: str, scheme: str) -> None:
    assert scheme_of(url) == scheme


def test_urls_are_split_only_if_every_part_is_a_url() -> None:
    assert split_urls("amqp://a; amqp://b;", ";") == ("amqp://a", "amqp://b")
    assert split_urls("amqp://a;amqp://b", "") == ("amqp://a;amqp://b",)
    assert split_urls("amqp://u:pass;word@a", ";") == ("amqp://u:pass;word@a",)
    assert split_urls("", ";") == ("",)


def test_the_tables_of_schemes_agree() -> None:
    assert set(SCHEMES) >= EMBEDDED
    assert serves("redis://h", "lock")
    assert not serves("amqp://h", "lock")
    assert not serves("reddis://h", "broker")


# check_url


def refusal(url: str, role: Role) -> str:
    with pytest.raises(ConfigError) as caught:
        check_url(url, role)
    return str(caught.value)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    "url",
    ["sqlite:///a.db", "sqlite:////a/b.db", "memory://", "memory://shop", "eager", "eager://"],
)
def test_the_embedded_stores_can_be_everything(url: str, role: Role) -> None:
    check_url(url, role)


def test_null_is_only_a_result_backend() -> None:
    check_url("null", "result backend")
    check_url("null://", "result backend")

    assert refusal("null", "broker") == (
        "broker URL 'null': 'null' works as result backend only"
        " (as broker: amqp, amqps, eager, memory, mongodb, "
        "mongodb+srv, postgres, postgresql, redis, redis+socket, rediss, sqlite)"
    )
    assert "works as result backend only" in refusal("null://", "lock")


def test_an_unknown_scheme_names_the_known_and_the_nearest() -> None:
    assert refusal("reddis://host", "broker") == (
        "broker URL 'reddis://host': unknown scheme 'reddis'"
        " (known: amqp, amqps, eager, memory, mongodb, mongodb+srv, "
        "postgres, postgresql, redis, redis+socket, rediss, sqlite; did you mean 'redis'?)"
    )
    known = (
        "(known: amqp, amqps, eager, memcache, memory, mongodb, mongodb+srv, null, "
        "postgres, postgresql, redis, redis+socket, rediss, sqlite"
    )
    assert known in refusal("x://", "result backend")


@pytest.mark.parametrize(
    ("url", "role"), [("amqp://h", "lock"), ("memcache://h", "broker"), ("memcache://h", "lock")]
)
def test_scheme_is_refused_in_a_role_it_cannot_have(url: str, role: Role) -> None:
    assert "only (as" in refusal(url, role)


@pytest.mark.parametrize("url", ["https://sqs.eu.amazonaws.com/1/q", "gcppubsub://p/s"])
def test_stores_of_go_that_do_not_exist_here_are_named(url: str) -> None:
    assert "is not supported" in refusal(url, "broker")


@pytest.mark.parametrize("url", ["", " "])
def test_an_empty_url_is_refused(url: str) -> None:
    assert "broker URL is empty" in refusal(url, "broker")


@pytest.mark.parametrize(
    ("url", "shown"), [("localhost:6379", "***"), ("memory", "memory"), ("tasks.db", "***")]
)
def test_a_text_without_a_scheme_is_refused(url: str, shown: str) -> None:
    assert f"broker URL {shown!r}: no scheme (expected scheme://…" in refusal(url, "broker")


@pytest.mark.parametrize(
    "url",
    ["a;b", "redis://a;redis://b", "redis://a/0,redis://b/0", "amqp://a//;amqp://b//"],
)
def test_several_urls_in_one_text_are_refused_with_the_way_to_write_them(url: str) -> None:
    mark = ";" if ";" in url else ","
    assert f"several brokers in one text need Config(multiple_broker_separator={mark!r}" in refusal(
        url, "broker"
    )


@pytest.mark.parametrize("url", ["eager://host", "null://host"])
def test_eager_and_null_take_nothing_after_the_scheme(url: str) -> None:
    assert "found something after" in refusal(url, "result backend")


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("memcache://", "found no host"),
        ("memcache://h,", "no host:port"),
        ("memcache://h:0", "no host:port"),
        ("memcache://h:70000", "no host:port"),
        ("memcache://h 1:1", "no host:port"),
        ("memcache://h/1", "found a path"),
        ("memcache:///run/memcached.sock", "found a path"),
        ("memcache://h?timeout=1", "found options"),
        ("memcache://user:secret@h", "found a user or password"),
    ],
)
def test_a_memcache_url_that_makes_no_sense_is_refused(url: str, found: str) -> None:
    text = refusal(url, "result backend")

    assert found in text
    assert "secret" not in text


def test_the_servers_of_a_memcache_url_keep_their_order() -> None:
    found = parse_memcache_url("memcache://b:11212,a,127.0.0.1:1,[::1]:11213/")

    assert found == (("b", 11212), ("a", 11211), ("127.0.0.1", 1), ("::1", 11213))
    check_url("memcache://b:11212,a", "result backend")


# StoreUrl


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("sqlite:///relative.db", StoreUrl(scheme="sqlite", path="relative.db")),
        ("sqlite:///sub/dir/x.db", StoreUrl(scheme="sqlite", path="sub/dir/x.db")),
        ("sqlite:////abs/path.db", StoreUrl(scheme="sqlite", path="/abs/path.db")),
        ("SQLite:///my%20tasks%3F.db", StoreUrl(scheme="sqlite", path="my tasks?.db")),
        ("sqlite:///a.db?", StoreUrl(scheme="sqlite", path="a.db")),
        (
            "sqlite:///a.db?synchronous=NORMAL",
            StoreUrl(scheme="sqlite", path="a.db", synchronous="normal"),
        ),
        (
            "sqlite:///a.db?busy_timeout=0.5&synchronous=full",
            StoreUrl(scheme="sqlite", path="a.db", synchronous="full", busy_timeout=0.5),
        ),
        ("memory://", StoreUrl(scheme="memory")),
        ("memory://Shop-1", StoreUrl(scheme="memory", name="Shop-1")),
        ("eager", StoreUrl(scheme="eager")),
        ("eager://", StoreUrl(scheme="eager")),
        ("null", StoreUrl(scheme="null")),
        ("null://", StoreUrl(scheme="null")),
    ],
)
def test_an_embedded_url_is_read(url: str, expected: StoreUrl) -> None:
    assert StoreUrl.parse(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://:memory:",
        "sqlite:///:memory:",
        "sqlite://",
        "sqlite:///",
        "sqlite://?synchronous=full",
    ],
)
def test_sqlite_without_a_file_is_refused_and_memory_offered(url: str) -> None:
    assert "found no file (for a store inside this process: memory://)" in refusal(url, "broker")


@pytest.mark.parametrize(
    ("url", "text"),
    [
        (
            "sqlite://x.db",
            "found a host (expected sqlite:///relative.db or sqlite:////absolute/path.db)",
        ),
        ("sqlite:///folder/", "found a folder"),
        ("sqlite:///a%00b", "NUL"),
        (
            "sqlite:///a.db?synchronus=full",
            "unknown option 'synchronus' "
            "(known: busy_timeout, synchronous; did you mean 'synchronous'?)",
        ),
        (
            "sqlite:///a.db?synchronous=off",
            "option 'synchronous' is 'off' (expected full or normal)",
        ),
        ("sqlite:///a.db?synchronous", "option 'synchronous' is '' (expected full or normal)"),
        (
            "sqlite:///a.db?busy_timeout=-1",
            "option 'busy_timeout' is '-1' (expected 0 to 3600 seconds)",
        ),
        ("sqlite:///a.db?busy_timeout=nan", "expected 0 to 3600 seconds"),
        ("sqlite:///a.db?busy_timeout=soon", "expected 0 to 3600 seconds"),
        ("sqlite:///a.db?busy_timeout=1&busy_timeout=2", "option 'busy_timeout' is given twice"),
        ("memory://a/b", "the name of a memory store is letters"),
        ("memory://a?size=3", "unknown option 'size' (known: none)"),
    ],
)
def test_an_embedded_url_that_makes_no_sense_is_refused(url: str, text: str) -> None:
    assert text in refusal(url, "broker")


def test_only_an_embedded_url_is_read() -> None:
    with pytest.raises(ConfigError, match="store URL 'redis://h': 'redis' is no embedded store"):
        StoreUrl.parse("redis://h")


def test_store_url_is_frozen_and_can_be_pickled() -> None:
    url = StoreUrl.parse("sqlite:///a.db")

    with pytest.raises(FrozenInstanceError):
        url.path = "b.db"  # type: ignore[misc]  # what is tested
    assert pickle.loads(pickle.dumps(url)) == url


def test_reference_page_lists_the_roles_of_each_scheme() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "config.md"
    found: dict[str, set[str]] = {}
    for line in page.read_text("utf-8").partition("\n## URLs")[2].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[2] in {"yes", "no", "as broker"}:
            for url in cells[0].split(", "):
                found[scheme_of(url.strip("`"))] = set(cells[1].split(", "))

    assert found == {scheme: set(roles) for scheme, roles in SCHEMES.items()}


@pytest.mark.parametrize(
    ("scheme", "options"),
    [("sqlite", SQLITE_OPTIONS), ("redis", REDIS_OPTIONS), ("amqp", AMQP_OPTIONS)],
)
def test_the_reference_page_has_every_option_of_a_url(
    scheme: str, options: Mapping[str, UrlOption]
) -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "config.md"
    found = re.findall(
        rf"^\| `{scheme}(s?):` \| `(\w+)` \|.*\| (.*) \| (.*) \|$",
        page.read_text("utf-8"),
        re.MULTILINE,
    )

    assert found == [
        ("s" if one.needs in ("tls", "cert_file") else "", name, one.kind.expected, one.meaning)
        for name, one in options.items()
    ]


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("redis://", ((("localhost", 6379),), "", "", 0)),
        ("redis://host", ((("host", 6379),), "", "", 0)),
        ("redis://se:cret@host:1/2", ((("host", 1),), "se", "cret", 2)),
        ("redis://secret@host", ((("host", 6379),), "", "secret", 0)),
        ("redis://:secret@host", ((("host", 6379),), "", "secret", 0)),
        ("redis://p%40ss@host", ((("host", 6379),), "", "p@ss", 0)),
        ("redis://a@b@host", ((("host", 6379),), "", "a@b", 0)),
        ("rediss://[::1]:7000/1", ((("::1", 7000),), "", "", 1)),
        ("redis://user:secret@h1:7000,h2/0", ((("h1", 7000), ("h2", 6379)), "user", "secret", 0)),
    ],
)
def test_a_redis_url_is_read_as_go_reads_it(url: str, found: tuple[object, ...]) -> None:
    read = parse_redis_url(url)

    assert (read.hosts, read.username, read.password, read.database) == found
    assert read.tls is url.startswith("rediss")
    check_url(url, "broker")


def test_a_redis_socket_has_its_database_behind_a_colon() -> None:
    read = parse_redis_url("redis+socket://user:secret@/run/redis.sock:/3")

    assert (read.path, read.hosts, read.username, read.password, read.database) == (
        "/run/redis.sock",
        (),
        "user",
        "secret",
        3,
    )
    assert parse_redis_url("redis+socket:///a.sock").database == 0


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://secret@h1:1,h2:2/3", "2 hosts are a cluster"),
        ("redis://secret@host/x", "the database is no number"),
        ("redis://secret@host:x", "the port is no number"),
        ("redis://secret@host/0?ssl=true", "unknown option 'ssl' (known: ca_file, cert_file, "),
        ("redis://secret@[::1", "has no ']'"),
        ("redis+socket://secret@host", "found no path of a socket"),
    ],
)
def test_invalid_redis_url_is_refused_without_its_password(url: str, text: str) -> None:
    assert text in refusal(url, "broker")
    assert "secret" not in refusal(url, "broker")


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("amqp://", ("localhost", 5672, "guest", "guest", "/")),
        ("amqp://h/", ("h", 5672, "guest", "guest", "/")),
        ("amqp://h//", ("h", 5672, "guest", "guest", "/")),
        ("amqp://u:p@h:5672//?heartbeat=9", ("h", 5672, "u", "p", "/")),
        ("amqp://ada:s%40c@h:1/shop", ("h", 1, "ada", "s@c", "shop")),
        ("amqp://ada@h/%2F", ("h", 5672, "ada", "", "/")),
        ("amqps://[::1]/a%2Fb", ("::1", 5671, "guest", "guest", "a/b")),
    ],
)
def test_an_amqp_url_is_gos(url: str, found: tuple[object, ...]) -> None:
    parsed = parse_amqp_url(url)

    assert (parsed.host, parsed.port, parsed.username, parsed.password, parsed.vhost) == found
    check_url(url, "broker")


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("amqp://h:x", "the port is no number"),
        ("amqp://h/a/b", "second '/'"),
        ("amqp://h//a", "second '/'"),
        ("amqp://:p@h", "no user"),
        ("amqp://h?verify=none", "needs TLS"),
        ("amqps://h?verify=maybe", "is 'maybe' (expected full or none)"),
        ("amqp://h?heartbeat=x", "option 'heartbeat' is 'x' (expected 1 to 65535 seconds)"),
        ("amqp://h?colour=red", "unknown option 'colour' (known: ca_file, "),
        ("amqp://a,b/v", "several hosts"),
        ("amqps://h?key_file=k", "needs 'cert_file'"),
    ],
)
def test_an_amqp_url_that_makes_no_sense_is_refused(url: str, text: str) -> None:
    assert text in refusal(url, "broker")
