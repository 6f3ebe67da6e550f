"""`plait doctor`: every question has an answer, on machines without a GPU too."""

from __future__ import annotations

import json

import pytest

from plait import doctor

TOPOLOGY = """\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity
GPU0\t X \tNV18\tSYS\tSYS\tPIX\t0-51
GPU1\tNV18\t X \tSYS\tSYS\tSYS\t0-51
GPU2\tSYS\tSYS\t X \tPHB\tSYS\t52-103
GPU3\tSYS\tSYS\tPHB\t X \tSYS\t52-103
NIC0\tPIX\tSYS\tSYS\tSYS\t X
"""


def test_json_has_every_section(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    assert doctor.main(["--json", "--out", str(tmp_path)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert list(facts) == ["machine", "software", "gpus", "extension", "disk", "plait uses"]
    assert facts["software"]["torch"].startswith("2.") and facts["software"]["triton"]
    assert facts["machine"]["cores"] >= 1
    assert isinstance(facts["disk"]["direct_io"], bool) and isinstance(facts["disk"]["io_uring"], bool)
    assert facts["extension"]["pinned memory"]
    assert list(tmp_path.iterdir()) == []


def test_text_names_what_plait_uses(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    for part in ("plait uses", "backend", "snapshot writes", "compiler", "nvlink domain", "direct_io"):
        assert part in text


def test_a_folder_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--json", "--out", "/nowhere"]) == 0
    assert "No such file" in json.loads(capsys.readouterr().out)["disk"]["reason"]


def test_nvlink_domains_from_the_topology_table() -> None:
    assert doctor.parse_topology(TOPOLOGY) == "GPU0 GPU1; GPU2; GPU3"
    assert doctor.parse_topology(TOPOLOGY.replace("NV18", "SYS")) == "none"
