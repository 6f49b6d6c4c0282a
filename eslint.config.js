import js from "@eslint/js";
import globals from "globals";

// A script makes one of these names, later ones of the same page use it.
const SHARED = ["Kit", "Graph", "Trends", "Plot", "Course", "Heat", "Lines", "Lists"];

export default [
  js.configs.recommended,
  {
    files: ["msprobe_engine/report/web/**/*.js"],
    languageOptions: {
      ecmaVersion: 2022,
      sourceType: "script",
      globals: { ...globals.browser, ...Object.fromEntries(SHARED.map((name) => [name, "readonly"])) },
    },
    linterOptions: { reportUnusedDisableDirectives: "error" },
    rules: {
      "eqeqeq": "error",
      "no-eval": "error",
      "no-implied-eval": "error",
      "no-new-func": "error",
      "no-var": "error",
      "prefer-const": ["error", { destructuring: "all" }],
      "strict": ["error", "global"],
      "no-unused-vars": ["error", { vars: "local", args: "after-used", argsIgnorePattern: "^_" }],
      "no-redeclare": ["error", { builtinGlobals: false }], // the script that makes a shared name
      "no-unused-expressions": ["error", { allowShortCircuit: true, allowTernary: true }],
      // Names of a run are only ever set as text.
      "no-restricted-properties": [
        "error",
        ...["innerHTML", "outerHTML", "insertAdjacentHTML", "setHTMLUnsafe"].map((property) => ({ property, message: "Set text, or make nodes with Kit.make." })),
        { object: "document", property: "write", message: "Make nodes with Kit.make." },
      ],
    },
  },
];
