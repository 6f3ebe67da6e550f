"""`pytest bench/ --benchmark-only`: gives this folder's tests the fixture and fingerprint of pytest_device.py."""

from plait.bench.pytest_device import device_benchmark, device_timer, pytest_benchmark_update_machine_info

__all__ = ["device_benchmark", "device_timer", "pytest_benchmark_update_machine_info"]
