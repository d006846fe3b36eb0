"""What a source of measurements has to tell."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from analysis.calibrate.measurements import Measurements
from confsim.errors import InputError
from confsim.latency.profile import Profile
from confsim.specs import GpuSpec, ModelSpec


class MeasurementSource(ABC):
    """Measurements that a profile is fitted to. A new one is a class `Source` in a file here, or a user's own.

    `folder` is the folder of measurements that `confsim fit profile=...` names; sources that have a package of
    their own get none.

    Raises:
        InputError: where a folder is needed and not given.
    """

    reads_folder = False

    def __init__(self, folder: Path | None = None) -> None:
        if self.reads_folder and folder is None:
            raise InputError("this source reads a folder that `confsim profile` wrote: name it, profile=FOLDER")
        self.folder = folder or Path()

    def specs(self) -> tuple[ModelSpec, GpuSpec] | None:
        """Model and GPU that were measured; None where those of the configuration are looked up."""
        return None

    @abstractmethod
    def load(self, model: ModelSpec, gpu: GpuSpec) -> Measurements:
        """The measurements for a model on a GPU.

        Raises:
            InputError: where there are none.
        """

    def finish(self, profile: Profile, data: Measurements, model: ModelSpec, gpu: GpuSpec) -> Profile:
        """The profile with what the fit itself cannot tell, such as errors of what was held out."""
        return profile
