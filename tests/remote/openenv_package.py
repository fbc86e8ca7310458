"""Run by Python where the package `openenv` is installed: a server of it, or a client of it.

python openenv_package.py serve PORT SESSIONS        an environment that echoes messages, with random numbers of the seed
python openenv_package.py play URL                   print what the generic client gets, a JSON line each
"""

import json
import random
import sys


def serve(port: int, sessions: int) -> None:
    import uvicorn
    from openenv.core.env_server import create_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class EchoAction(Action):
        message: str

    class EchoObservation(Observation):
        prompt: str

    class Echo(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            super().__init__()
            self._state, self.random = State(step_count=0), random.Random()

        def reset(self, seed=None, episode_id=None, **others):
            self._state, self.random = State(episode_id=episode_id, step_count=0), random.Random(seed)
            return EchoObservation(prompt=f"say {self.random.random()}")

        def step(self, action, timeout_s=None, **others):
            if action.message == "bug":
                raise KeyError("a mistake")
            self._state.step_count += 1
            text, reward = f"{action.message} {self.random.random()}", self.random.random()
            return EchoObservation(prompt=text, reward=reward, done=self._state.step_count == 3)

        @property
        def state(self):
            return self._state

    app = create_app(Echo, EchoAction, EchoObservation, env_name="echo", max_concurrent_envs=sessions)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


def play(url: str) -> None:
    from openenv.core import GenericEnvClient

    with GenericEnvClient(base_url=url).sync() as env:
        result = env.reset(seed=7, episode_id="mine")
        print(json.dumps([result.observation, result.reward, result.done]))
        while not result.done:
            result = env.step({"message": "abc"})
            print(json.dumps([result.observation, result.reward, result.done]))
        print(json.dumps(env.state()))
        for action in ({"message": "abc"}, {"code": "abc"}):
            try:
                env.step(action)
            except RuntimeError as error:
                print(json.dumps(str(error)))


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    play(*rest) if command == "play" else serve(*map(int, rest))
