"""How bodies and headers are shown: what is masked, what is hidden, what is left exactly as it was written."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from sqlalchemy import Engine, text

from outbox.errors import InvalidSettings
from outbox.message.content import Codecs
from outbox.message.masking import KEYS, cleaned, leaves, names_in, path_of, read_json, secrets_of
from outbox.operator.look.inbox_sql import address_sql
from outbox.operator.look.redactor import Redactor, has_at
from outbox.text import MASK, without, without_addresses

JSON = "application/json"
MASKED = Redactor()
FULL = Redactor("full")
HIDDEN = Redactor("hidden")


def shown(document: str, redactor: Redactor = MASKED, **options: Any) -> Any:
    """Return a JSON body as it is shown, read again."""
    text = redactor.body(JSON, document.encode(), **options).text
    assert text is not None
    return json.loads(text)


#: Names that tell of a secret, in their usual spellings.
TELLING = """
password Password PASSWORD user_password userPassword old-password db.password passwd pwd pass_word passWord
userpassword passwort dbPass
secret clientSecret client_secrets token accessToken access_token refreshtoken X-Auth-Token bearer jwt id_token tokens
authorization Authorization proxy-authorization cookie Set-Cookie sessioncookie auth authHeader authorisation
card cardNumber credit_card CARD-NO card_no cardno cardnumber creditCardNumber creditcardnumber debitcard
debit_card_number cards cardHolder cardholdername ccNumber cc_num cc-number ccn ccnum pan PAN primaryPAN cardPAN
cvv cvc cvv2 CVV2 cvc2 cvvCode cvv_code cvvcode csc cvn securityCode security_code securitycode
pin PIN pins PINs pinCode pin_code pincode pinBlock userPin newPIN pin1 mpin atm-pin
otp OTP otpCode otp_code otpcode one_time_code oneTimePassword one-time-pass totp mfaCode mfa_code 2fa_code 2faCode
verificationCode recovery_codes backupCodes smsCode
apiKey api_key API-Key apikey APIKEY APIKey api.key apiKeys privateKey private_key privatekey secretKey secret_key
accessKey access_key_id encryptionKey signingKey ssh_key masterKey session_key clientKey x-api-key
signature signatures X-Signature signatureValue hmac sig hmac_signature webhookSignature
IBAN ibanOfSender iban ibans IBANs bic BIC swiftCode sort_code sortCode sortcode sort-codes accountNumber
account_number account-no accountNo accountno account_nr acct_no acctNumber accNo bankAccount bank_account
bankAccountNumber routingNumber routing_number routing_no aba_number bsb
ssn SSN userSSN SSNs socialSecurityNumber social_security_no nationalId national_insurance_number nino taxId tax_id
taxID taxid tax_ids taxNumber tax_no taxpayerId tin passportNumber passport passport_no driversLicense driving_licence
credentials email eMail e-mail emailAddress EMAIL_ADDRESS emails mail mails mailAddress customerEmail customeremail
email1 emailaddress useremailaddr email_addr pw pass userPass tan mTAN tans iTAN track1 track2 track1Data track_2 vatId
vat_number p\u00e1ssword pa\u0301ssword p\u0308in
birthday birthDate birth_date birthdate dateOfBirth date_of_birth dateofbirth dob DOB birth birthPlace userBirthdate
yearOfBirth
phone phoneNumber phonenumber phone_no mobilePhone telephone telephoneNumber phones cellphone mobileNumber mobile_no
homePhone fax faxNumber tel msisdn
[password] user[email] $password password_1 card2
"""
#: Names that only look like such.
HARMLESS = """
id amount discard cardinality cardiology tokenizer phonebook passage secretary author scarab wildcards_allowed ssnake
order.id 名前
pinned pinning spinning opinion pinterest keyboard key keys primary_key foreignKey partitionKey routing_key public_key
publicKey idempotency_key order_key cacheKey monkey turkey
account account_type accountType accounts account_id accountStatus accounting signed assigned design signal authority
authored authentic company panel span expand japan
mailbox mailer rebirthing ship_to hotpot option optional tint tin_foil bicycle biceps cellar mobile cell cc telegram
tracking track4 trackingNumber tangent titan
television hotel routing tax taxes taxi tax_rate vat discount passenger compass passed bypass surpass pass_count
number no num tracking track4 trackingNumber tangent titan
cookiecutter smsText code country_code postcode zip discount_code currency error_code tokenized bornAt born_at aba
shaba transaction_id session session_id microphone headphones hash digest checksum status state name address city
"""


def test_names_that_are_masked() -> None:
    """Names with a telling word in them, however they are written: in bodies, headers, searches and audits."""
    for name in [*TELLING.split(), "\uff50\uff41\uff53\uff53word", "pass\u200bword", "x" * 300]:
        assert MASKED.names.masks(name), name
        assert shown(json.dumps({name: "hidden"})) == {name: MASK}, name
        assert MASKED.headers({name: "hidden"}) == {name: MASK}, name
        assert MASKED.document({name: "hidden"}) == {name: MASK}, name
        assert MASKED.hides_in_body(path_of(["order", name]), "hidden"), name
        assert MASKED.hides_header(name, "hidden"), name


def test_names_that_are_not() -> None:
    """Words that only contain a telling one are shown."""
    assert [name for name in ["", *HARMLESS.split()] if MASKED.names.masks(name)] == []


def test_names_cost_little() -> None:
    """A name takes steps in proportion to its length, whatever it is made of: bodies are written by others."""
    pattern = re.compile(rf"(?:^|_)(?:{KEYS})(?:_|$)")
    assert pattern.search("x_" * 50_000 + "y") is None


#: Names and numbers of elements, as a path writes them.
PATHS: list[tuple[list[str | int], str]] = [
    (["order", "lines", 0, "id"], "order.lines.0.id"),
    (["api.key"], '"api.key"'),
    (["", "a"], '"".a'),
    (['say "hi"', "a=b", "a[0]", "back\\slash"], r'"say \"hi\""."a\u003db"."a[0]"."back\\slash"'),
    (["größe", "名前", "two words", " blank"], 'größe.名前.two words." blank"'),
    (["\ud800", "a\nb"], r'"\ud800"."a\nb"'),
    (["007", 12], "007.12"),
    ([], ""),
]


@pytest.mark.parametrize(("names", "path"), PATHS)
def test_a_path_names_one_place(names: list[str | int], path: str) -> None:
    """What writes a path and what reads it are inverse to each other: one place has one path."""
    assert path_of(names) == path
    assert names_in(path) == list(map(str, names))
    document: Any = "found"
    for name in reversed(names):
        document = [*["other"] * name, document] if isinstance(name, int) else {name: document}
    assert has_at(json.dumps(document).encode(), path, "found") is True


@pytest.mark.parametrize("path", ['a."b', 'a"b"', '"a"b', r'"\x"'])
def test_what_is_no_path(path: str) -> None:
    """A quote that isn't closed, or in a name: which place is meant isn't known, so it counts as masked."""
    with pytest.raises(ValueError):
        names_in(path)
    assert MASKED.hides_in_body(path, "x")


@pytest.mark.parametrize(
    ("document", "masked"),
    [
        ({"api.key": "s3cret"}, ['"api.key"']), ({"order": {"a.cvv": "123", "n": 1}}, ['order."a.cvv"']),
        ({"cards": [{"no": 1}], "x": [{"pin": 1}]}, ["cards", "x.0.pin"]), ([1, {"a": 2, "otp": 3}], ["0", "1.otp"]),
        ({"a": '{"pin": 1}'}, ["a"]),
    ],
)  # fmt: skip
def test_one_place_is_masked_everywhere(document: Any, masked: list[str]) -> None:
    """What the body is shown without is masked in the changes of an edit, and can't be searched for."""
    raw = json.dumps(document).encode()
    assert MASKED.body(JSON, raw).masked == tuple(masked)
    changes = MASKED.changes(raw, json.dumps("nothing").encode())
    assert changes is not None
    hidden = {each["path"] for each in changes if each["from"] == MASK}
    assert all(any(path == each or str(path).startswith(f"{each}.") for path in hidden) for each in masked)
    shown_values = [each["from"] for each in changes if each["from"] not in {MASK, None}]
    assert all(str(value) in (MASKED.body(JSON, raw).text or "") for value in shown_values)
    for names, value in leaves(read_json(raw)):
        path = path_of(names)
        is_masked = any(path == each or path.startswith(f"{each}.") for each in masked)
        assert MASKED.hides_in_body(path, value) is is_masked, path


def test_values_without_any_name() -> None:
    """What no name says anything of is masked: elements of an array that is the whole."""
    assert shown('["4111", 123, ["x"], {"a": "shown"}, true, null]') == [
        MASK, MASK, [MASK], {"a": "shown"}, True, None,
    ]  # fmt: skip
    assert MASKED.document(["4111", 1, {"a": [2]}]) == [MASK, MASK, {"a": [2]}]
    assert MASKED.document("4111") == MASKED.document(4111) == MASK
    assert (MASKED.document(True), MASKED.document(None)) == (True, None)


def test_the_size_of_what_is_masked_is_no_clue() -> None:
    """The length of a body would tell that of what is masked in it; it is told where all of it is shown."""
    raw = b'{"pin": "1234"}'
    assert MASKED.body(JSON, raw).size is None
    assert MASKED.body("text/plain", b"1234").size is None
    assert HIDDEN.body(JSON, b'{"a": 1}').size is None
    assert MASKED.body(JSON, b'{"a": 1}').size == 8
    assert MASKED.body(JSON, raw, reveal=True).size == FULL.body(JSON, raw).size == len(raw)


@pytest.mark.parametrize(
    ("document", "text", "expected"),
    [
        ({"card": "4111-1111"}, "no 4111-1111 in store", "no *** in store"),
        ({"pin": 1234}, "ValueError: 1234 is not 12345", "ValueError: *** is not 12345"),
        ({"a": {"token": ["ab\ncd"]}}, "KeyError: 'ab\\ncd'", "KeyError: '***'"),
        ({"a": '{"pin": "9876"}'}, "got 9876", "got ***"),
        ({"a": "shown", "pin": "12", "otp": True}, "12 is shown, and true", "12 is shown, and true"),
        ("hunter2", "refused: hunter2", "refused: ***"),
        ({"email": "a@b.example"}, "Key (email)=(a@b.example) already exists.", "Key (email)=(***) already exists."),
    ],
)
def test_texts_quote_no_secret(document: Any, text: str, expected: str) -> None:
    """A text about a message has none of its masked values, as they are written or as Python or JSON write them."""
    assert without(text, MASKED.names.secrets_in(read_json(json.dumps(document)))) == expected


def test_results_of_acts() -> None:
    """What a function returned is shown as a body is, and changes by their paths, whatever console wrote them."""
    result = {
        "bulk_job": "x", "function": "undo", "returned": {"iban": "DE", "ok": True},
        "changes": [{"path": '"api.key"', "from": "a", "to": None}, {"path": "n", "from": "1", "to": "2"}],
    }  # fmt: skip
    changes = [{"path": '"api.key"', "from": MASK, "to": None}, {"path": "n", "from": "1", "to": "2"}]
    assert MASKED.audited(result) == {**result, "returned": {"iban": MASK, "ok": True}, "changes": changes}
    assert MASKED.audited({"returned": "DE89"}) == {"returned": MASK}
    hidden = HIDDEN.audited(result)
    assert (hidden["returned"], hidden["function"], hidden["changes"][1]["to"]) == (MASK, "undo", MASK)
    assert FULL.audited(result) == MASKED.audited(result, reveal=True) == result
    assert MASKED.audited(None) is None


def test_masked_at_any_depth() -> None:
    """A value of any kind is masked as a whole, wherever it stands; its path is told."""
    body = MASKED.body(
        JSON,
        b"""{"a": {"password": {"deep": [1, {"b": 2}]}, "n": 1},
        "list": [{"email": null}, {"ok": []}, [{"token": [1, 2]}]], "card": [], "last": {}}""",
    )
    assert json.loads(body.text or "") == {
        "a": {"password": MASK, "n": 1},
        "list": [{"email": MASK}, {"ok": []}, [{"token": MASK}]],
        "card": MASK,
        "last": {},
    }
    assert body.masked == ("a.password", "list.0.email", "list.2.0.token", "card")
    assert not body.revealed
    assert not body.truncated


def test_twice_the_same_name() -> None:
    """A name that comes twice in an object is masked twice."""
    text = MASKED.body(JSON, b'{"pwd": "one", "x": 1, "pwd": "two", "x": 2}').text or ""
    assert "one" not in text
    assert "two" not in text
    assert text.count('"x"') == 2


def test_json_in_a_text() -> None:
    """A text that is JSON itself is masked as a whole if it holds what would be masked, however deep it is packed."""
    packed = json.dumps({"inner": json.dumps([json.dumps({"password": "x"})])})
    harmless = json.dumps({"a": 1})
    assert shown(json.dumps({"one": packed, "two": harmless, "three": "{no json", "four": [packed]})) == {
        "one": MASK, "two": harmless, "three": "{no json", "four": [MASK],
    }  # fmt: skip
    assert MASKED.headers({"context": packed, "plain": harmless}) == {"context": MASK, "plain": harmless}


@pytest.mark.parametrize(
    "value",
    ["12.30", "1.10", "1e400", "-0", "-0.0", "0.1000000000000000055511151231257827", "12345678901234567890123456789",
     "1E+2", "9" * 5000, "true", "null", '"\\u00e9\\ud800"', '"a\\"]},:b"', '"<script>"', "[]", "{}", "NaN",
     "-Infinity"],
)  # fmt: skip
def test_values_stay_as_they_are_written(value: str) -> None:
    """No number is rounded and no text spelled anew, masked or not."""
    for redactor in (MASKED, FULL):
        text = redactor.body(JSON, f'{{"a":{value},"b":[{value}]}}'.encode()).text or ""
        assert re.sub(r"\s", "", text) == f'{{"a":{value},"b":[{value}]}}'


def test_white_space_between_tokens_is_ours() -> None:
    """JSON is shown with a line for each member."""
    body = FULL.body(JSON, b'\r\n{"a" :[1,\t{ } ,[ ]],"b":{"c":"d e"}}\n')
    assert body.text == '{\n  "a": [\n    1,\n    {},\n    []\n  ],\n  "b": {\n    "c": "d e"\n  }\n}'


@pytest.mark.parametrize(
    ("content_type", "raw"),
    [
        ("text/plain", b"my password is x"), ("text/html", b"<script>"), ("application/xml", b"<password/>"),
        ("application/x-www-form-urlencoded", b"password=x"), (JSON, b'"a text alone"'), (JSON, b"4111111111111111"),
        (JSON, b'{"a": '), (JSON, b""), (JSON, b"[" * 100_000 + b"]" * 100_000), (JSON, b'{"a": "\xff"}'),
        (JSON, b'{"a": "\x00"}'), ("application/octet-stream", b"{}"), ("", b"{}"), ("image/png", b"\x89PNG"),
    ],
)  # fmt: skip
def test_what_cannot_be_judged_is_hidden(content_type: str, raw: bytes) -> None:
    """Without names there is nothing to judge a value by: nothing of it is shown."""
    body = MASKED.body(content_type, raw)
    assert (body.text, body.size, body.content_type, body.masked) == (None, None, content_type, ())


@pytest.mark.parametrize(
    ("content_type", "raw", "text"),
    [
        ("text/plain; charset=utf-8", "grüße\0".encode(), "grüße\0"), ("TEXT/HTML", b"<script>", "<script>"),
        (JSON, b'"alone"', '"alone"'), (JSON, b'{"a": ', '{"a": '), ("application/problem+json", b"[1]", "[\n  1\n]"),
        ("application/soap+xml", b"<a/>", "<a/>"), ("text/plain", b"\xff", None),
        ("application/octet-stream", b"ok", None), ("image/svg", b"<svg/>", None),
    ],
)  # fmt: skip
def test_revealed_and_full(content_type: str, raw: bytes, text: str | None) -> None:
    """Texts are shown as they are where that is wanted; what isn't text never is."""
    assert FULL.body(content_type, raw).text == text
    assert MASKED.body(content_type, raw, reveal=True).text == text
    assert HIDDEN.body(content_type, raw, reveal=True).text == text


def test_revealed_is_unmasked() -> None:
    """A revealed body says so, and nothing of it is masked; headers and results alike."""
    body = MASKED.body(JSON, b'{"password": "x"}', reveal=True)
    assert json.loads(body.text or "") == {"password": "x"}
    assert (body.revealed, body.masked) == (True, ())
    assert MASKED.headers({"cookie": "x"}, reveal=True) == {"cookie": "x"}
    assert MASKED.document({"card": 1}, reveal=True) == {"card": 1}


def test_hidden_shows_nothing() -> None:
    """Where bodies are hidden, so are the values of headers and results."""
    assert HIDDEN.body(JSON, b'{"a": 1}').text is None
    assert HIDDEN.headers({"trace": "1"}) == {"trace": MASK}
    assert HIDDEN.document({"a": 1}) == MASK
    assert HIDDEN.document(None) is None


def test_documents_that_were_read() -> None:
    """The result of a compensation is masked as a body is."""
    document = {"ok": [1.5, {"iban": "DE"}], "text": '{"pwd": 1}', "none": None}
    assert MASKED.document(document) == {"ok": [1.5, {"iban": MASK}], "text": MASK, "none": None}
    assert FULL.document(document) == document


@pytest.mark.parametrize("redactor", [Redactor(limit=100), Redactor("full", limit=100)], ids=["masked", "full"])
def test_long_bodies_are_cut(redactor: Redactor) -> None:
    """More than the limit isn't shown, never half of a character; that there is more is told."""
    long = json.dumps({"note": "é" * 1000}, ensure_ascii=False).encode()
    body = redactor.body(JSON, long)
    assert body.truncated
    assert body.size == (len(long) if redactor.display == "full" else None)
    assert 97 <= len((body.text or "").encode()) <= 100
    short = redactor.body(JSON, b'{"a": 1}')
    assert not short.truncated


def test_masked_beyond_the_limit() -> None:
    """What is cut off isn't told of either; a large body costs no more than its shown part."""
    body = Redactor(limit=50).body(JSON, json.dumps({"a": "x" * 80, "password": "y"}).encode())
    assert (body.truncated, body.masked) == (True, ())


def test_own_names() -> None:
    """Other names can be masked instead, by a pattern of words."""
    redactor = Redactor(keys=r"konto(nummer)?|gehalt")
    assert shown('{"kontoNummer": 1, "GEHALT": 2, "password": 3}', redactor) == {
        "kontoNummer": MASK, "GEHALT": MASK, "password": 3,
    }  # fmt: skip
    assert Redactor(keys=re.compile("salary")).names.masks("baseSalary")


@pytest.mark.parametrize("wrong", [{"display": "some"}, {"keys": "("}, {"keys": "(?i)gehalt"}, {"limit": 0}])
def test_settings_that_are_none(wrong: dict[str, Any]) -> None:
    """What makes no sense is refused at once."""
    with pytest.raises(InvalidSettings):
        Redactor(**wrong)


@pytest.mark.parametrize(
    ("path", "value", "found"),
    [
        ("order.id", "42", True), ("order.id", "42.0", False), ("order.amount", "12.30", True),
        ("order.amount", "12.3", False),
        ("order.lines.0.name", "a", True), ("order.lines.1.name", "b", True), ("order.lines.2.name", "b", False),
        ("order.lines.-1.name", "b", False), ("order.paid", "true", True), ("order.paid", "True", False),
        ("order.none", "null", True), ("order.none", "", False), ("order", "42", False), ("order.id.x", "42", False),
        ("order.lines", "a", False), ("", "42", False),
        ("big", "12345678901234567890123", True), ("order.empty", "", True),
    ],
)  # fmt: skip
def test_values_at_a_path(path: str, value: str, found: bool) -> None:
    """A value in a body is compared as it is written."""
    raw = b"""{"order": {"id": 42, "amount": 12.30, "lines": [{"name": "a"}, {"name": "b"}], "paid": true, "none": null,
               "empty": ""}, "big": 12345678901234567890123}"""
    assert has_at(raw, path, value) is found


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b"[" * 100_000, b"null", b"7"])
def test_values_in_what_is_no_document(raw: bytes) -> None:
    """What can't be read has no values."""
    assert not has_at(raw, "a", "b")


def test_empty_containers_are_no_secrets_within() -> None:
    """They are read once: their text is JSON again, which has nothing in it."""
    documents: list[Any] = [{"a": {}}, {"a": [{}] * 1000}, {"a": "{}"}, {"a": "[]"}, ["{}", [], {}]]
    for document in documents:
        assert [
            each for each in MASKED.names.secrets_in(read_json(json.dumps(document))) if each not in {"{}", "[]"}
        ] == []


def test_what_is_below_a_masked_name_is_a_part_of_the_value() -> None:
    """A number of a card may be the name of a member: neither the path of a change nor a result tells it."""
    changes = MASKED.changes(b'{"cards": {"4539148803436467": {"limit": 5}}}', b'{"cards": {"4539148803436467": {}}}')
    assert changes is not None
    assert {each["path"] for each in changes} == {"cards"}
    secrets = {"4539148803436467", "Alice@Example.com"}
    assert "4539" not in json.dumps(cleaned({"returned": 1, "4539148803436467": 1}, secrets, is_text=True))
    assert without("no user alice@example.com", secrets) == f"no user {MASK}"


@pytest.mark.parametrize("secret", ["\ud800abcd", "a\0b", "%%%%", "(((", "ß" * 8, "\\" * 4])
def test_any_text_can_be_taken_out(secret: str) -> None:
    """JSON holds halves of surrogate pairs and more: code that tells of an error can't fail."""
    assert without(f"it was {secret} there", [secret]) == f"it was {MASK} there"


def test_what_json_has_for_truth_is_no_secret() -> None:
    """However it is written."""
    assert without("it is true, not False", ["True", "false"]) == "it is true, not False"


CARD = "4111111111111111"


@pytest.mark.parametrize(
    ("secret", "text", "expected"),
    [
        (CARD, "no 4111 1111 1111 1111, 4111-1111-1111-1111", "no ***, ***"),
        ("+49 30 1234567", "+49301234567", "+***"),
        ("a b&c/d", "q=a+b%26c%2Fd or a%20b%26c/d", "q=*** or ***"), ("a b/c", "a%2520b%252Fc", MASK),
        ('say "hi"', json.dumps(json.dumps({"a": 'say "hi"'})), r'"{\"a\": \"***\"}"'),
        ("größe", json.dumps(json.dumps("größe")), r'"\"***\""'), ("größe", repr(json.dumps("größe")), "'\"***\"'"),
        (CARD, "got '411111111…", "got '***…"), (CARD, "LINE 1: ...1111111' x", "LINE 1: ...***' x"),
        (CARD, f"'{CARD[:9]} ... (7 truncated) ... {CARD[-9:]}'", "'*** ... (7 truncated) ... ***'"),
        (CARD, "9" * 990 + f" {CARD[:9]}", "9" * 990 + " ***"), (CARD, "a411111 b...", "a411111 b..."),
    ],
)  # fmt: skip
def test_other_writings_and_parts_of_secrets(secret: str, text: str, expected: str) -> None:
    """Grouped, written twice, and what is left of a value that was cut."""
    assert without(text, [secret]) == expected


def test_many_secrets_cost_little() -> None:
    """Also of a text with ellipses, and of what repeats itself: no more than a second's work, by far."""
    secrets = {f"customer {number}@corp.example" for number in range(3000)} | {"a" * 50_000}
    assert without("aaaaaa… " * 3000, secrets).count(MASK) == 3000


#: Bodies, what of them is shown, and the secrets that an error may not quote.
PACKED: list[tuple[str, Any]] = [
    (json.dumps({"note": f"amount=5&card={CARD}"}), {"note": MASK}),
    (json.dumps({"url": f"https://corp.example/pay?x=1&token={CARD}"}), {"url": MASK}),
    (json.dumps({"log": f'{{"a": 1}}\n{{"pin": "{CARD}"}}'}), {"log": MASK}),
    (json.dumps({"text": f'\ufeff{{"pin": "{CARD}"}}'}), {"text": MASK}),
    (json.dumps({"cards": json.dumps({"first": CARD})}), {"cards": MASK}),
    ("\ufeff" + json.dumps({"n": 1, "pin": CARD}), {"n": 1, "pin": MASK}),
    (json.dumps([{"name": "cardNumber", "value": CARD}]), [{"name": "cardNumber", "value": MASK}]),
    (json.dumps([{"Value": {"no": CARD}, "Key": "card"}]), [{"Value": MASK, "Key": "card"}]),
    (json.dumps({"path": "/user/email", "old": CARD}), {"path": "/user/email", "old": MASK}),
    (
        json.dumps({"a": [{"name": "size", "value": 7}], "u": "a?b=c"}),
        {"a": [{"name": "size", "value": 7}], "u": "a?b=c"},
    ),
]


@pytest.mark.parametrize(("document", "expected"), PACKED)
def test_names_that_are_packed(document: str, expected: Any) -> None:
    """In a form, in lines, behind a BOM, beside the value: masked where the body is shown, and taken out of errors."""
    assert shown(document) == expected
    secrets = set(secrets_of(MASKED.names, {}, JSON, document.encode(), Codecs()))
    assert without(f"declined: {CARD}", secrets) == f"declined: {MASK if CARD in document else CARD}"
    changes = MASKED.changes(document.encode(), b"{}")
    assert CARD not in json.dumps(changes)


@pytest.mark.parametrize(
    "raw", [f"amount=5&card={CARD}", f'{{"a": 1}}\n{{"pin": "{CARD}"}}\n', f"see https://x/?pin={CARD}"]
)
def test_bodies_without_names_of_json(raw: str) -> None:
    """Nothing of them is shown; what they say by names is taken out of errors, too."""
    for content_type in (JSON, "text/plain", "application/x-ndjson", "application/x-www-form-urlencoded"):
        assert MASKED.body(content_type, raw.encode()).text is None
        secrets = set(secrets_of(MASKED.names, {}, content_type, raw.encode(), Codecs()))
        assert without(f"no {CARD} here", secrets) == "no *** here"


def test_nothing_is_found_by_a_value_that_is_named_by_another() -> None:
    """A search by what isn't shown would tell it."""
    raw = json.dumps({"a": [{"name": "card", "value": CARD}], "b": {"value": "x"}}).encode()
    assert has_at(raw, "a.0.value", CARD)
    assert not has_at(raw, "a.0.value", CARD, MASKED.names)
    assert has_at(raw, "b.value", "x", MASKED.names)


def test_a_form_in_a_form_has_an_end() -> None:
    """However it is written."""
    assert list(MASKED.names.secrets_in({"a": "a=" * 50_000})) == []


#: What a viewer sees of texts that tell where something is, as libpq, psycopg, asyncio and others write it.
ADDRESSES = {
    'server at "db.example" (10.83.7.219), port 5432 failed: refused': "server at ***, port *** failed: refused",
    "pool of postgresql+psycopg://ann:pw@[fd00:83::7:219]:54329/shop": "pool of ***",
    "no way to db.example:54329/shop now": "no way to *** now",
    "no route to  fd00:83::7:219": "no route to  ***",
    'server certificate for "db.example" does not match host name "x"': (
        "server certificate for *** does not match host name ***"
    ),
    "host=db.example port=54329 user='ann' dbname=shop": "host=*** port=*** user=*** dbname=***",
    "cannot connect to host db.example:54329 ssl": "cannot connect to host *** ssl",
    "Connect call failed ('fd00::1', 54329, 0, 0)": "Connect call failed ***",
    "::ffff:10.83.7.219, ::1, 1:2:3:4:5:6:7:8, fd00:: and x10.83.7.219_a": "***, ***, ***, *** and x***_a",
    "on socket \"/run/postgresql/.s\", role 'ann'": "on socket ***, role ***",
    'cut: server at "db.exam…': "cut: server at ***",
    "cut: db.exam…": "cut: ***",
    "cut: db.exam...": "cut: ***",
    "server at '::1', port 1 failed: refused": "server at ***, port *** failed: refused",
    **{
        each: each
        for each in (
            '{"order":1234567,"at":30} [:5] f(a):3 12:30:05 01:23:45:67:89:ab bad::face std::vector',
            "user 4711, role 7, host 5 of 9, port 3, a.py:12/foo, 1:2/3, 10:30/PT1H, 2026-12-01T12:30:05/2026",
            "gave …",
            "gave ...",
            # In each way to part it, one would try them for minutes.
            f'x :: "id":{"a" * 60}_x',
            f"{'1.' * 2_000}_x {':a' * 2_000}_x {'a:' * 2_000}_x",
        )
    },
}


def test_addresses_are_the_same_to_python_and_to_postgresql(engine: Engine) -> None:
    """What a viewer sees can be searched for; and what looks a little like an address stays."""
    assert [without_addresses(each) for each in ADDRESSES] == list(ADDRESSES.values())
    masked = text("SELECT regexp_replace(t, :hidden, E'\\\\1***', 'g') FROM unnest(CAST(:texts AS text[])) t")
    with engine.connect() as connection:
        found = connection.scalars(masked, {"hidden": address_sql(), "texts": list(ADDRESSES)}).all()
    assert found == list(ADDRESSES.values())
