"""Calls a reward on samples, all together or one at a time; whatever it raises or returns is an outcome."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from mindgrpo.errors import UserError
from mindgrpo.rewards.call import BadResult, Samples, call_reward, is_usable
from mindgrpo.rewards.load import RewardFunction, describe
from mindgrpo.rewards.outcome import BAD_RESULT, MEMORY, NOT_FINITE, RAISED, REFUSED, Failure

if TYPE_CHECKING:
    import asyncio


class Attempts:
    """One event loop for all calls, so that what an async function keeps open stays usable."""

    def __init__(self, function: RewardFunction) -> None:
        self.function = function
        self._loop: asyncio.AbstractEventLoop | None = None

    def together(self, samples: Samples) -> list[float | None] | Failure:
        """Return values, those that are not finite included, or why there are none."""
        try:
            return call_reward(self.function, samples, self._wait_for)
        except UserError as error:
            return Failure(REFUSED, str(error))
        except BadResult as error:
            return Failure(BAD_RESULT, f"returned {error}")
        except MemoryError as error:
            return Failure(MEMORY, describe(error))
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # the user's own code
            return Failure(RAISED, describe(error))

    def alone(self, samples: Samples, index: int) -> float | None | Failure:
        result = self.together(samples.select([index]))
        return result if isinstance(result, Failure) else judged(result[0])

    def _wait_for(self, waiting: Awaitable[Any]) -> Any:
        async def wait() -> Any:
            return await waiting

        import asyncio  # takes as long to import as the rest of this room

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(wait())


def judged(value: float | None) -> float | None | Failure:
    return value if is_usable(value) else Failure(NOT_FINITE, f"returned {value}")
