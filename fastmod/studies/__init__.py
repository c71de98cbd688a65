"""The papers' experiments as studies: one command runs, resumes and reports them."""

from fastmod.runs.config import Config, StudyError
from fastmod.studies.registry import get, names

__all__ = ["Config", "StudyError", "get", "names"]
