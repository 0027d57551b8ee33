"""Programs that use Shardyard as a user would write them: workers, an evaluator, a serving client."""
