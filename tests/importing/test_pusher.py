"""Credentials of an app at Pusher, in the forms that its dashboard and applications have."""

import pytest

from redpoll.importing import documents, pusher
from redpoll.importing.plan import SourceError


@pytest.mark.parametrize(
    "text",
    [
        'app_id = "123"\nkey = "k1"\nsecret = "s1"\ncluster = "eu"\n',
        "PUSHER_APP_ID=123\nPUSHER_APP_KEY=k1\nPUSHER_APP_SECRET=s1\nPUSHER_APP_CLUSTER=eu\n",
        "PUSHER_URL=https://k1:s1@api-eu.pusher.com/apps/123\nPUSHER_CLUSTER=eu",
        '{"app_id": "123", "key": "k1", "secret": "s1", "cluster": "eu"}',
        '[{"appId": 123, "key": "k1", "secret": "s1", "cluster": "eu"}]',
    ],
)
def test_credentials_in_every_form(tmp_path, text):
    (tmp_path / "keys").write_text(text)
    plan = pusher.read(documents.load(tmp_path / "keys"))
    (app,) = plan.apps
    assert (app.id, app.key, app.secret) == ("123", "k1", "s1")
    notes = {row.theirs: row.note for row in plan.rows if not row.ours}
    assert "wants some cluster" in notes["cluster"]
    assert notes["Enable client events"] == "redpoll app set 123 client_events=false if it is off"


def test_file_without_credentials_is_refused(tmp_path):
    (tmp_path / "keys").write_text("PUSHER_APP_KEY=k1")
    with pytest.raises(SourceError, match="no id and no secret"):
        pusher.read(documents.load(tmp_path / "keys"))
