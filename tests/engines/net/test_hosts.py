"""A center on one host, workers on another: by address, token file and a certificate that is pinned."""

from __future__ import annotations

import paragrad as pg
from paragrad.engines.transport import endpoint
from paragrad.rundir.record import read
from tests.engines.net.hosts import two_hosts
from tests.engines.net.kills import check_sound, same_bits
from tests.engines.net.victim import Scene, Task


def test_workers_of_another_host_train_as_those_of_this_machine(tmp_path):
    with two_hosts() as (here, there):
        task = Task(pg.SyncSGD(), batches=40, optimizer="adam:lr=0.01", engine={"address": f"{here.address}:0"})
        with Scene(task, tmp_path / "scene") as scene:
            scene.serve(host=here.name)
            found = scene.endpoint()
            assert found.address.startswith(f"{here.address}:")
            assert found.certificate is not None, "a line that leaves the machine is encrypted by itself"
            copies = tmp_path / "elsewhere"
            copies.mkdir()
            for name in (endpoint.TOKEN, endpoint.CERTIFICATE):
                (copies / name).write_bytes((scene.out / name).read_bytes())
                (copies / name).chmod(0o600)
            for _ in range(task.workers):
                scene.join(
                    where=found.address,
                    host=there.name,
                    token_file=copies / endpoint.TOKEN,
                    certificate=copies / endpoint.CERTIFICATE,
                    shared=False,
                )
            scene.wait()
        check_sound(scene)
    assert not [event for event in read(scene.out) if event.kind == "lost"]
    near = task.train(tmp_path / "near", pg.Local(workers=2, threads=1))
    assert same_bits(scene.out, near.directory)
