"""Rows of all checks of frameworks, in the order of the report."""

from __future__ import annotations

from gpuwarden.doctor.frameworks.build_checks import BUILD_CHECKS
from gpuwarden.doctor.frameworks.installation_checks import ENVIRONMENT_CHECKS
from gpuwarden.doctor.frameworks.job_checks import JOB_CHECKS
from gpuwarden.doctor.frameworks.variable_checks import VARIABLE_CHECKS

FRAMEWORK_CHECKS = (*ENVIRONMENT_CHECKS, *BUILD_CHECKS, *VARIABLE_CHECKS, *JOB_CHECKS)
