// SPDX-License-Identifier: Apache-2.0
// Reads a list of objects, as JSON; writes a list with what is wrong with each, empty where nothing is.
import { readFileSync } from "node:fs";
import * as certManager from "@kubernetes-models/cert-manager/cert-manager.io/v1";
import * as prometheus from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1";

const kinds = { ...certManager, ...prometheus };
const wrong = (object) => {
  try {
    new kinds[object.kind](object).validate();
    return "";
  } catch (error) {
    return error.message;
  }
};
process.stdout.write(JSON.stringify(JSON.parse(readFileSync(0, "utf8")).map(wrong)));
