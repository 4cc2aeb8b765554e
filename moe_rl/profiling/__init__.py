"""Measurements of a run: recordings attributed to the parts of a step, and cluster constants fitted to measurements.

    runs = read_recordings([Path("rank0.json"), Path("rank1.json")])        # torch.profiler or nsys, rank -> run
    attributed = [attribute(run) for run in runs.values()]
    split = split_waiting(attributed)                                       # all-to-all time: transfer, and waiting
    rows = derive_measurements(attributed, split, shape).rows
    predict = moe_rl.study.measured.predicted_seconds
    hardware = calibrate(rows, load_cluster("h100"), ["gemm_tflops"], source="ours", predict=predict).hardware

`ranges` names the parts of a step for NVTX and torch.profiler. Imported as `moe_rl.profiling`, without torch.
"""

from moe_rl.profiling import ranges
from moe_rl.profiling.attribution import AttributedWork, BusyTime, attribute, busy_time, seconds_by_category
from moe_rl.profiling.calibration import CONSTANTS, CalibrationResult, calibrate
from moe_rl.profiling.comparison import ComparedPart, compare, measured_parts
from moe_rl.profiling.events import ProfiledRun
from moe_rl.profiling.kernel_classes import classify_kernel
from moe_rl.profiling.measurements import Measurement, measurements_csv, read_measurements
from moe_rl.profiling.recorded_measurements import DerivedMeasurements, RecordedShape, derive_measurements
from moe_rl.profiling.recordings import read_recording, read_recordings
from moe_rl.profiling.waiting import WaitSplit, split_waiting

__all__ = [
    "CONSTANTS", "AttributedWork", "BusyTime", "CalibrationResult", "ComparedPart", "DerivedMeasurements",
    "Measurement", "ProfiledRun", "RecordedShape", "WaitSplit", "attribute", "busy_time",
    "calibrate", "classify_kernel", "compare", "derive_measurements", "measured_parts", "measurements_csv",
    "ranges", "read_measurements", "read_recording", "read_recordings",
    "seconds_by_category", "split_waiting",
]  # fmt: skip
