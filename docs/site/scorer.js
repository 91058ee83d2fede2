// Order of the results of a search: guides come first, then the reference; names, measurements and the changelog come last.
{
  // Sphinx gives many pages the same score, so the weights also decide between guides. The first entry that fits counts.
  const WEIGHTS = [
    ["docs/guides/serving", 14],
    ["docs/guides/operations", 13],
    ["docs/guides/security", 12],
    ["docs/guides/", 10],
    ["docs/reference/", 5],
    ["docs/results/", -40],
    ["docs/api/", -40],
    ["CHANGELOG", -50],
  ];
  // A heading with the words of the search, whose result leads to it, comes before the page that has it.
  const HEADING = 5;

  Scorer.score = ([page, , , , score, , kind]) => {
    const found = WEIGHTS.find(([beginning]) => page.startsWith(beginning));
    return score + (found ? found[1] : 0) + (kind === SearchResultKind.title ? HEADING : 0);
  };
}
